"""A program with shard_map bodies as data, and as Python source that can be pasted and run.

A program is a block of steps on global values. The block of a `Region` holds steps on per-rank values; a `Transform` is
a transform of `torch.func` of a block. Each value has a name of its own in the whole program, so a block may close over
the values of the blocks around it.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import attrs

Letters: TypeAlias = Mapping[str, str]
"""The type of a per-rank value along each manual axis: I (invariant), V (varying), U (unreduced) or R (reduced)."""


@attrs.frozen
class Layout:
    """How a value is sharded: for each dim the axes that shard it, major first, and the axes along which it is partial.

    >>> Layout((("x", "y"), ()), ("z",)).text()
    "P(('x', 'y'), None, partial={'z': 'sum'})"
    """

    dims: tuple[tuple[str, ...], ...] = ()
    partial: tuple[str, ...] = ()

    def text(self) -> str:
        """The spec as Python source."""
        dims = [repr(axes[0]) if len(axes) == 1 else repr(axes) if axes else "None" for axes in self.dims]
        if self.partial:
            dims.append("partial={" + ", ".join(f"{axis!r}: 'sum'" for axis in self.partial) + "}")
        return f"P({', '.join(dims)})"

    @property
    def axes(self) -> frozenset[str]:
        """The axes that are named."""
        return frozenset((*(axis for dim in self.dims for axis in dim), *self.partial))


@attrs.frozen
class Local:
    """Ordinary torch code that computes one value from others of the same rank: `text` assigns `target`.

    Of the values `sizes` it reads shapes only, which may differ between ranks.
    """

    target: str
    text: str
    operands: tuple[str, ...]
    sizes: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)

    def source(self) -> str:
        return self.text + "\n"


@attrs.frozen
class Length:
    """An option of a collective: the length of a dim of the value in its `sizes`, on each rank its own."""

    dim: int


@attrs.frozen
class Collective:
    """A call of one of `spmd.collectives` on one value; `axis_index` has no operand.

    Of the values `sizes` it reads shapes only: an option may be a `Length`.
    """

    target: str
    name: str
    operands: tuple[str, ...]
    axes: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()
    sizes: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)

    def source(self) -> str:
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        options = [f"{name}={self._option(value)}" for name, value in self.options]
        return f"{self.target} = {self.name}({', '.join((*self.operands, repr(axes), *options))})\n"

    def _option(self, value: Any) -> str:
        return f"{self.sizes[0]}.shape[{value.dim}]" if isinstance(value, Length) else repr(value)


@attrs.frozen
class Block:
    """Steps from parameters to results."""

    params: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]

    def source(self, name: str) -> str:
        """The block as a function; of one result as it is, of several as a tuple."""
        results = self.results[0] if len(self.results) == 1 else f"({', '.join(self.results)})"
        body = "".join(step.source() for step in self.steps) + f"return {results}\n"
        return f"def {name}({', '.join(self.params)}):\n{textwrap.indent(body, '    ')}"


@attrs.frozen
class Region:
    """A call of a shard_map'd block; `axes` None for all axes of the mesh."""

    targets: tuple[str, ...]
    block: Block
    operands: tuple[str, ...]
    axes: tuple[str, ...]
    in_layouts: tuple[Layout, ...]
    out_layouts: tuple[Layout, ...]
    check: bool

    @property
    def name(self) -> str:
        return f"body_{self.targets[0]}"

    def mapped(self) -> str:
        """The shard_map'd function as Python source."""
        outs = [layout.text() for layout in self.out_layouts]
        out_specs = outs[0] if len(outs) == 1 else f"({', '.join(outs)})"
        ins = "".join(layout.text() + ", " for layout in self.in_layouts)
        names = "{" + ", ".join(map(repr, self.axes)) + "}"
        return f"shard_map({self.name}, mesh, ({ins}), {out_specs}, axis_names={names}, check={self.check})"

    def source(self) -> str:
        call = f"{', '.join(self.targets)} = {self.mapped()}({', '.join(self.operands)})\n"
        return self.block.source(self.name) + call


class Kind(str, Enum):
    """The transforms of `torch.func` that a block may be under, and the loop or branch of which it may be the body."""

    GRAD = "grad"
    VJP = "vjp"
    JVP = "jvp"
    VMAP = "vmap"
    SCAN = "scan"
    COND = "cond"


@attrs.frozen
class Transform:
    """A transform of a block, called on values of the block around it, or a loop or a branch.

    Args:
        targets: what it computes: gradients for each operand (grad, vjp), one tangent (jvp), one result (vmap); the
            carry of the last trip (scan); the result of the block, or else its operand (cond).
        kind: the transform.
        block: a function with one result, which is a scalar for grad.
        operands: the arguments of the block.
        shared: for each argument the axes along which it is invariant: the ranks have one variable together.
        counted_once: the axes along which the result is invariant: its ranks make up one term of the loss.
        extra: the cotangent (vjp), the tangents of the operands (jvp), or what decides by its sign (cond).
        in_dims, out_dim: of vmap.
        trips: of scan.
    """

    targets: tuple[str, ...]
    kind: Kind
    block: Block
    operands: tuple[str, ...]
    shared: tuple[tuple[str, ...], ...] = ()
    counted_once: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    in_dims: tuple[int | None, ...] = ()
    out_dim: int = 0
    trips: int = 0

    @property
    def name(self) -> str:
        return f"inner_{self.targets[0]}"

    def source(self) -> str:
        return self.block.source(self.name) + self._call() + "\n"

    def _call(self) -> str:
        """The call of the transformed block, and the assignment of what it computes."""
        name, operands, targets = self.name, ", ".join(self.operands), ", ".join(self.targets)
        if self.kind is Kind.GRAD:
            return f"({targets},) = torch.func.grad({name}, {tuple(range(len(self.operands)))})({operands})"
        if self.kind is Kind.VJP:
            return f"({targets},) = torch.func.vjp({name}, {operands})[1]({', '.join(self.extra)})"
        if self.kind is Kind.JVP:
            return f"{targets} = torch.func.jvp({name}, ({operands},), ({', '.join(self.extra)},))[1]"
        if self.kind is Kind.SCAN:
            return f"{targets} = scan(lambda c, _: ({name}(c), None), {operands}, length={self.trips})[0]"
        if self.kind is Kind.COND:
            return f"{targets} = cond({self.extra[0]}.sum() > 0, {name}, lambda x: x * 1, {operands})"
        return f"{targets} = torch.vmap({name}, {self.in_dims}, {self.out_dim})({operands})"


Step: TypeAlias = Local | Collective | Region | Transform


class Mode(str, Enum):
    """How a program is called and differentiated."""

    ALONE = "alone"
    """A shard_map'd function called at top level; transforms from outside."""
    JIT = "jit"
    """All of it, derivatives too, inside one jitted function."""
    OUTSIDE = "outside"
    """A jitted function; transforms from outside."""


@attrs.frozen
class Program:
    """A function of global tensors.

    Args:
        seed: the seed that it was generated from.
        mode: how it is called.
        mesh: names and sizes of the mesh axes.
        constants: steps that make tensors outside of the function.
        block: the function.
        shapes: the shapes of its arguments.
        in_layouts: the specs of its arguments.
    """

    seed: int
    mode: Mode
    mesh: tuple[tuple[str, int], ...]
    constants: tuple[Local, ...]
    block: Block
    shapes: tuple[tuple[int, ...], ...]
    in_layouts: tuple[Layout, ...]

    def definitions(self) -> str:
        """The source of the mesh, the constants, the function `program` and its arguments `arguments`."""
        axes = ", ".join(f"{name!r}: {size}" for name, size in self.mesh)
        text = f'mesh = make_mesh({{{axes}}}, runtime="virtual")\n'
        text += "".join(step.source() for step in self.constants)
        if self.mode is Mode.ALONE:
            (region,) = self.block.steps
            assert isinstance(region, Region)
            text += region.block.source(region.name) + f"program = {region.mapped()}\n"
        else:
            text += self.block.source("program")
        tensors = "".join(f"    {argument_text(shape, index)},\n" for index, shape in enumerate(self.shapes))
        return text + f"arguments = [\n{tensors}]\n"

    def specs(self) -> str:
        """The source of `in_specs`."""
        return "(" + "".join(layout.text() + ", " for layout in self.in_layouts) + ")"


def argument_text(shape: Sequence[int], index: int) -> str:
    """The source of an argument: numbers without ties, which depend on its position."""
    factor, first = 0.61803398875 + 0.1 * index, 0.3 + 0.17 * index
    numbers = f"(torch.arange({math.prod(shape)}) * {factor} + {first}) % 1 * 2.2 - 1"
    return f"({numbers}).reshape({tuple(shape)})"


def walk(steps: Sequence[Step]) -> Iterator[Step]:
    """All steps of blocks, those inside of blocks too."""
    for step in steps:
        yield step
        if isinstance(step, (Region, Transform)):
            yield from walk(step.block.steps)


def renamed(text: str, old: str, new: str) -> str:
    """A text with one name in place of another."""
    return re.sub(rf"\b{old}\b", new, text)
