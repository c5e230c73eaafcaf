"""What plans of small functions send, beside closed forms of what they must, and the memory that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

import spmd
from proofs.least_sent.sweep import BYTES_ONLY
from spmd import P
from spmd.inspect.plan import Plan
from spmd.plan.search.orders import plan

ROWS, COLUMNS = 2**20, 4096
"""The sizes of an operand, unless an example has others."""
SMALL = 65536
"""Bytes below which a closed form may be exceeded by half of what is sent: time is latency there."""
_SCALARS = 64
"""Bytes of a few numbers of which a closed form may know nothing."""
_BY_ROWS = P("x")


@attrs.frozen(eq=False)
class Example:
    """A function of sharded tensors.

    Args:
        name: its name.
        function: the function; its gradient is that of the first operand.
        shapes: the shapes of the operands.
        specs: the specs of the operands.
        out: the spec of the result, or of each.
        least: the bytes that a rank must send, of the rank that must send most.
        gradient: the same for the gradient, from a cotangent that has the spec of the result; None if there is none.
        before: what a plan of version 0.1 sent, in MB; empty if unknown.
        axes: the sizes of the mesh axes.
        dtype: the dtype of the operands.
    """

    name: str
    function: Callable[..., Any]
    least: float
    gradient: float | None = None
    out: Any = _BY_ROWS
    shapes: Sequence[tuple[int, ...]] = ((ROWS, COLUMNS),)
    specs: Sequence[P] = (_BY_ROWS,)
    before: str = ""
    axes: tuple[int, ...] = (8,)
    dtype: torch.dtype = torch.float32

    def plan(self, gradient: bool) -> Plan:
        """The plan of the function, or of its gradient, at the default prices."""
        operands = [torch.empty(shape, dtype=self.dtype, device="meta") for shape in self.shapes]
        specs: list[Any] = list(self.specs)
        function, out = self.function, self.out
        if gradient:
            results = self._results(operands)
            is_one = isinstance(results, torch.Tensor)
            outs = [self.out] if is_one else list(self.out)
            floating = [result.is_floating_point() or result.is_complex() for result in _list(results)]
            operands += [
                torch.empty_like(r, device="meta") for r, is_it in zip(_list(results), floating, strict=True) if is_it
            ]
            specs += [spec for spec, is_it in zip(outs, floating, strict=True) if is_it]
            function, out = self._pullback(floating), self.specs[0]
        mesh = spmd.make_mesh(dict(zip("xy", self.axes, strict=False)), runtime="virtual")
        return spmd.jit(function, tuple(specs), out, mesh=mesh).plan(*operands)

    def _results(self, operands: Sequence[torch.Tensor]) -> Any:
        """The results, without values: a function may have constants on the processor."""
        with torch.device("meta"), torch.no_grad():
            return self.function(*operands)

    def _pullback(self, floating: Sequence[bool]) -> Callable[..., Any]:
        count = len(self.shapes)

        def pullback(*tensors: torch.Tensor) -> Any:
            def primal(x: torch.Tensor) -> Any:
                results = _list(self.function(x, *tensors[1:count]))
                return tuple(result for result, is_it in zip(results, floating, strict=True) if is_it)

            return torch.func.vjp(primal, tensors[0])[1](tuple(tensors[count:]))[0]

        return pullback


def _list(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


@attrs.frozen
class Figures:
    """The bytes of a plan, at prices where only bytes count and at the default ones, and those that it must send.

    Args:
        name: the function's name, or its gradient's.
        least: the closed form.
        sent: bytes at prices where only they count.
        default: bytes at the default prices.
        peak: the most memory of the default plan, in shards of the largest operand.
        before: what an earlier version sent.
    """

    name: str
    least: float
    sent: float
    default: float
    peak: float
    before: str = ""

    @property
    def ratio(self) -> float:
        """The most that either plan sends beside the closed form; the bytes of a few scalars do not count."""
        most = max(self.sent, self.default)
        return 1.0 if most <= self.least + _SCALARS else most / self.least if self.least else float("inf")

    @property
    def is_close(self) -> bool:
        """Test for at most 1.25 times the closed form, or twice where it is small."""
        return self.ratio <= (2 if self.least < SMALL else 1.25)


def figures(example: Example) -> Iterator[Figures]:
    """The figures of a function, and of its gradient."""
    for gradient, least in ((False, example.least), (True, example.gradient)):
        if least is None:
            continue
        default = example.plan(gradient)
        cheapest = plan(attrs.evolve(default.request, machine=BYTES_ONLY))
        shard = max(spec.local_bytes() for spec in default.request.input_specs)
        sent, usual = (sum(comm.bytes for comm in found.comms) for found in (cheapest, default))
        name = f"{example.name}, gradient" if gradient else example.name
        yield Figures(name, least, sent, usual, default.memory.peak / shard, "" if gradient else example.before)
