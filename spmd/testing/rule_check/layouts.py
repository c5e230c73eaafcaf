"""`check_layouts` runs an operator on operands in other memory layouts, and compares with contiguous operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from spmd.core.spec import TensorMeta
from spmd.rules.layouts import OF_SOME_PROCESSORS, Need, need
from spmd.testing.rule_check.execute import FAILURES, replace_tensors, tensors_of
from spmd.testing.rule_check.expected import Expected, perturbed
from spmd.testing.rule_check.strides import MemoryLayout, layouts, rare_layouts

_Call: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
_Op: TypeAlias = torch._ops.OpOverload


@attrs.frozen
class LayoutRun:
    """One run of a call with some operands in another layout.

    Args:
        call: the call, as text.
        arguments: the names of the arguments whose layout was changed.
        layout: the layout's name.
        strides: the strides of each of these arguments.
        met: the strongest need that each of them met.
        reason: what was wrong with the results, or the error; None if they were right.
    """

    call: str
    arguments: tuple[str, ...]
    layout: str
    strides: tuple[tuple[int, ...], ...]
    met: tuple[Need, ...]
    reason: str | None = None

    def is_let_through(self, needs: Callable[[str], Need]) -> bool:
        """Whether the run's operands meet these needs, given by argument name."""
        return all(met >= needs(name) for name, met in zip(self.arguments, self.met, strict=True))

    def is_right_row(self, argument: str) -> bool:
        """Whether only `argument` was changed, to contiguous rows that are not a contiguous tensor, and was right."""
        return self.arguments == (argument,) and self.met == (Need.ROWS,) and self.reason is None

    def __str__(self) -> str:
        given = ", ".join(f"{name} {strides}" for name, strides in zip(self.arguments, self.strides, strict=True))
        return f"{self.call}: {self.layout}, strides of {given}: {self.reason}"


@attrs.frozen
class LayoutReport:
    """What `check_layouts` found.

    Args:
        op: the operator's name.
        calls: how many calls it was run on.
        runs: how many layouts of their operands were compared.
        skipped: how many layouts were not compared, because the operator rejects the values of expanded operands.
        sensitive: the runs that were wrong or raised.
        failing: the sensitive runs that the declared needs do not rule out.
        found: by argument name, the needs that the sensitive runs show.
        unneeded: arguments with a declared need that no run shows.
        crashed: whether the process died in a run that the declared needs rule out.
    """

    op: str
    calls: int = 0
    runs: int = 0
    skipped: int = 0
    sensitive: tuple[LayoutRun, ...] = ()
    failing: tuple[LayoutRun, ...] = ()
    found: Mapping[str, Need] = attrs.field(factory=dict)
    unneeded: tuple[str, ...] = ()
    crashed: bool = False


_DTYPES = {torch.float64: torch.float32, torch.complex128: torch.complex64}
"""Operators may have other kernels in single precision."""


def check_layouts(op: _Op, calls: Sequence[_Call], *, values: bool = True, met: bool = False) -> LayoutReport:
    """Run an operator on operands in other memory layouts, one operand at a time and all operands together.

    Args:
        op: the operator.
        calls: arguments and keyword arguments of calls, with real tensors.
        values: False for operators whose values are arbitrary (`empty_like`): only shapes and dtypes are compared then.
        met: run only layouts that meet the operator's declared needs (`spmd.rules.layouts.need`).

    Returns:
        A report; `report.failing` is empty if the declared needs suffice.

    >>> import torch
    >>> report = check_layouts(torch.ops.aten.view_as_complex.default, [((torch.randn(4, 3, 2),), {})])
    >>> report.failing, dict(report.found)
    ((), {'self': <Need.CONTIGUOUS: 2>})
    """
    runs: list[LayoutRun] = []
    sized = any("size" in argument.name for argument in op._schema.arguments)
    count = skipped = 0
    for args, kwargs in calls:
        given = tensors_of((*args, *kwargs.values()))
        for tensors in _variants(given, sized):
            example = _Example.of(op, args, kwargs, tensors)
            if example is not None:
                found = list(example.runs(values, met))
                runs += [run for run in found if run is not None]
                skipped += found.count(None)
                count += 1
    return _summarize(op, count, skipped, runs)


def _variants(given: Sequence[Tensor], sized: bool) -> Iterator[list[Tensor]]:
    """The operands; also in single precision; also with one dim shortened to length 1, if no sizes are arguments.

    The stride of a dim of length 1 is arbitrary, and some kernels then mistake one memory format for another.
    """
    yield [_contiguous(tensor) for tensor in given]
    if any(tensor.dtype in _DTYPES for tensor in given):
        yield [_contiguous(tensor.to(_DTYPES.get(tensor.dtype, tensor.dtype))) for tensor in given]
    shapes = {tensor.shape for tensor in given if tensor.ndim > 2}
    if len(shapes) != 1 or sized or not all(tensor.is_floating_point() for tensor in given):
        return  # shortened operands would rarely fit together, and not all kernels check that
    others = {size for tensor in given if tensor.ndim <= 2 for size in tensor.shape}
    for dim, size in enumerate(shapes.pop()):
        if size > 1 and size not in others:
            yield [_contiguous(tensor.narrow(dim, 0, 1) if tensor.ndim > 2 else tensor) for tensor in given]


def _summarize(op: _Op, calls: int, skipped: int, runs: Sequence[LayoutRun]) -> LayoutReport:
    sensitive = tuple(run for run in runs if run.reason is not None)
    failing = tuple(run for run in sensitive if run.is_let_through(lambda argument: need(op, argument)))
    names = [argument.name for argument in op._schema.arguments]
    found = _needs(runs)
    shown = op.namespace == "aten" and str(op) not in OF_SOME_PROCESSORS
    unneeded = tuple(name for name in names if shown and need(op, name) and name not in found)
    return LayoutReport(str(op), calls, len(runs), skipped, sensitive, failing, found, unneeded)


def _needs(runs: Sequence[LayoutRun]) -> dict[str, Need]:
    """The weakest needs that rule out every wrong run; `Need.ROWS` only if all layouts in `_ROWS` are right."""
    found: dict[str, Need] = {}
    for run in runs:
        if run.reason is not None and len(set(run.arguments)) == 1:
            name = run.arguments[0]
            rows = min(run.met) is Need.ANY and _ROWS <= {other.layout for other in runs if other.is_right_row(name)}
            found[name] = max(found.get(name, Need.ANY), Need.ROWS if rows else Need.CONTIGUOUS)
    let_through = lambda name: found.get(name, Need.ANY)  # noqa: E731
    for run in runs:
        if run.reason is not None and run.is_let_through(let_through):
            found.update(dict.fromkeys(run.arguments, Need.CONTIGUOUS))
    return found


_ROWS = {"padded rows", "every other row", "first dims swapped", "expanded along 0"}
"""Layouts with contiguous rows; an operand that is right in all of them needs no more than `Need.ROWS`."""


@attrs.frozen(eq=False)
class _Example:
    """A call with contiguous operands, the names of the arguments that they belong to, and the expected results."""

    op: _Op
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]
    names: Sequence[str]
    results: Sequence[Expected]

    @classmethod
    def of(cls, op: _Op, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> _Example | None:
        """The example; None if the operator rejects these operands."""
        named = [*zip((argument.name for argument in op._schema.arguments), args, strict=False), *kwargs.items()]
        names = [name for name, value in named for _ in tensors_of((value,))]
        example = cls(op, args, kwargs, tensors, names, ())
        try:
            return attrs.evolve(example, results=example.expected(tensors))
        except FAILURES:
            return None

    def __str__(self) -> str:
        rest = [value for value in self.args if value is not None and not tensors_of((value,))]
        return f"{self.op}({', '.join(map(str, [*map(TensorMeta.of, self.tensors), *rest]))})"

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results on other operands; the random seed is the same in each run."""
        given = iter(tensors)
        args = replace_tensors(tuple(self.args), given)
        kwargs = replace_tensors(dict(self.kwargs), given)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            return list(tensors_of((self.op(*args, **kwargs),)))

    def expected(self, tensors: Sequence[Tensor]) -> list[Expected]:
        """The expected results: those on contiguous copies of the operands."""
        generator = torch.Generator().manual_seed(0)
        operands = [_contiguous(tensor) for tensor in tensors]
        first, again = (self.run([tensor.clone() for tensor in operands]) for _ in range(2))
        try:
            moved = self.run([perturbed(tensor, generator) for tensor in operands])
        except FAILURES:
            moved = first
        return [Expected.of(*results) for results in zip(first, again, moved, strict=True)]

    def runs(self, values: bool, met: bool) -> Iterator[LayoutRun | None]:
        """One run for each layout of the operands; None where the operator rejects the values of the layout."""
        for layout, changed in _layouts(self.tensors):
            run = self._described(layout.name, changed)
            if met and not run.is_let_through(lambda name: need(self.op, name)):
                continue
            tensors = [changed.get(position, tensor) for position, tensor in enumerate(self.tensors)]
            try:
                expected = self.expected(tensors) if layout.is_expanded else self.results
            except FAILURES:
                yield None
            else:
                yield attrs.evolve(run, reason=self._difference(tensors, expected, values))

    def _described(self, layout: str, changed: Mapping[int, Tensor]) -> LayoutRun:
        names = tuple(self.names[position] for position in changed)
        levels = tuple(max(level for level in Need if level.is_met(tensor)) for tensor in changed.values())
        return LayoutRun(str(self), names, layout, tuple(tensor.stride() for tensor in changed.values()), levels)

    def _difference(self, tensors: Sequence[Tensor], expected: Sequence[Expected], values: bool) -> str | None:
        try:
            results = self.run([_own(tensor) for tensor in tensors])
        except FAILURES as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if len(results) != len(expected):
            return f"{len(results)} results, expected {len(expected)}"
        for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            reason = (wanted if values else attrs.evolve(wanted, error=None)).difference(result)
            if reason is not None:
                return f"result {index}: {reason}"
        return None


def _layouts(tensors: Sequence[Tensor]) -> Iterator[tuple[MemoryLayout, dict[int, Tensor]]]:
    """Each operand alone in each of its layouts, then all operands that can have a layout together in it."""
    options = [{layout.name: layout for layout in (*layouts(tensor), *rare_layouts(tensor))} for tensor in tensors]
    for position, option in enumerate(options):
        yield from ((layout, {position: layout(tensors[position])}) for layout in option.values())
    for name, layout in {name: layout for option in options for name, layout in option.items()}.items():
        having = [position for position, option in enumerate(options) if name in option]
        if len(having) > 1:
            yield layout, {position: options[position][name](tensors[position]) for position in having}


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _own(tensor: Tensor) -> Tensor:
    """A copy with the same strides in storage of its own, as some operators write to their operands."""
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
