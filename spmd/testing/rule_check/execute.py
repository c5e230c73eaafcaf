"""Run one strategy of one call on virtual shards: the executor behind `check_rule`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from spmd.collectives.environment import axis_environment
from spmd.core.mesh import Mesh
from spmd.core.placement import Partial, Placement, Reduction, Replicate, Shard, neutral_element
from spmd.core.spec import TensorMeta, chunk_bounds
from spmd.errors import SpmdError
from spmd.ir.call import Call
from spmd.ir.graph import Graph
from spmd.rules.rule import Body, FactorDims, Factors, Rule
from spmd.rules.strategy import Strategy
from spmd.runtime.lockstep import generate_lockstep
from spmd.runtime.virtual import run_in_lockstep
from spmd.tracing.trace import trace_flat

AXIS = "axis"
"""The name of the one mesh axis that strategies are executed on."""


FAILURES = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, SpmdError)
"""What operators and local implementations raise on tensors that do not fit together."""


@attrs.frozen(eq=False)
class Example:
    """One call with real arguments, and its unsharded results; `checked` is as in `check_rule`."""

    call: Call
    tensors: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    checked: bool = True

    @classmethod
    def of(
        cls, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *, checked: bool = True
    ) -> Example:
        """Run an operator on real arguments."""
        results = tensors_of(op(*args, **kwargs))
        meta = lambda leaf: TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf  # noqa: E731
        call = Call(op, _map(meta, tuple(args)), _map(meta, dict(kwargs)), tuple(map(TensorMeta.of, results)))
        return cls(call, tensors_of((*args, *kwargs.values())), results, checked)

    def __str__(self) -> str:
        metas = ", ".join(map(str, self.call.operands))
        rest = [argument for argument in self.call.args if isinstance(argument, (bool, int, float, str))]
        return f"{self.call.op}({metas}{'; ' if rest else ''}{', '.join(map(str, rest))})"

    def arguments(
        self, tensors: Sequence[Tensor], size_argument: int | None = None, shape: Sequence[int] = ()
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with other tensors, and with `shape` in place of the size argument, if there is one."""
        given = iter(tensors)
        replace = lambda leaf: next(given) if isinstance(leaf, TensorMeta) else leaf  # noqa: E731
        args, kwargs = _map(replace, self.call.args), _map(replace, dict(self.call.kwargs))
        if size_argument is not None:
            size = list(shape) if isinstance(args[size_argument], (tuple, list)) else shape[0]
            args = (*args[:size_argument], size, *args[size_argument + 1 :])
        return args, kwargs


def tensors_of(tree: Any) -> tuple[Tensor, ...]:
    """The tensors in nested tuples and lists, in order."""
    if isinstance(tree, Tensor):
        return (tree,)
    return tuple(itertools.chain.from_iterable(map(tensors_of, tree))) if isinstance(tree, (tuple, list)) else ()


def replace_tensors(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """A tree of tuples, lists and dicts with its tensors replaced by `tensors`, in order."""
    return _map(lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf, tree)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map(function, item) for item in tree)
    if isinstance(tree, dict):
        return {key: _map(function, item) for key, item in tree.items()}
    return function(tree)


Grouping: TypeAlias = tuple[tuple[int, ...], ...]
"""For each dim of a tensor, the lengths of the factors whose product it is, major first."""


def logical_shapes(metas: Sequence[TensorMeta], dims: Sequence[FactorDims], factors: Factors) -> tuple[Grouping, ...]:
    """The factor lengths of every dim of tensors whose dims have these factors; a dim without factors is one part."""
    return tuple(
        tuple(tuple(factors.sizes[n] for n in names) or (size,) for names, size in zip(tensor, meta.shape, strict=True))
        for tensor, meta in zip(dims, metas, strict=True)
    )


def physical_shape(grouping: Grouping, placement: Placement, ranks: int, rank: int) -> tuple[int, ...]:
    """The shape of one rank's shard; `placement` refers to logical dims, one per factor."""
    flat = [size for group in grouping for size in group]
    if isinstance(placement, Shard):
        start, stop = chunk_bounds(flat[placement.dim], (ranks,), (rank,))
        flat[placement.dim] = stop - start
    sizes = iter(flat)
    return tuple(math.prod(next(sizes) for _ in group) for group in grouping)


def split_placement(
    value: Tensor, grouping: Grouping, placement: Placement, ranks: int, generator: torch.Generator
) -> list[Tensor]:
    """Every rank's shard of `value`; for a Partial, random unequal parts of both signs that reduce to `value`."""
    if isinstance(placement, Replicate):
        return [value] * ranks
    if isinstance(placement, Partial):
        return _split_partial(value, placement.op, ranks, generator)
    logical = value.reshape([size for group in grouping for size in group])
    bounds = [chunk_bounds(logical.shape[placement.dim], (ranks,), (rank,)) for rank in range(ranks)]
    return [
        logical.narrow(placement.dim, start, stop - start)
        .reshape(physical_shape(grouping, placement, ranks, rank))
        .contiguous()
        for rank, (start, stop) in enumerate(bounds)
    ]


def _split_partial(value: Tensor, op: Reduction, ranks: int, generator: torch.Generator) -> list[Tensor]:
    if value.dtype == torch.bool:
        winner = torch.randint(ranks, value.shape, generator=generator)
        rest = torch.full_like(value, bool(neutral_element(op, torch.bool)))
        return [torch.where(winner == rank, value, rest) for rank in range(ranks)]
    if value.is_floating_point() or value.is_complex():
        noise = [_dyadic(3 * torch.randn(value.shape, generator=generator, dtype=value.dtype)) for _ in range(ranks)]
    else:
        noise = [torch.randint(-9, 10, value.shape, generator=generator, dtype=value.dtype) for _ in range(ranks)]
    if op == "sum":
        parts = noise[1:]
        return [value - sum(parts, torch.zeros_like(value)), *parts]
    winner = torch.randint(ranks, value.shape, generator=generator)
    sign = -1 if op == "max" else 1
    others = [value + sign * part.abs() for part in noise]
    nothing = torch.full_like(value, neutral_element(op, value.dtype))  # at some elements, as from empty shards
    others = [torch.where(torch.rand(value.shape, generator=generator) < 0.3, nothing, other) for other in others]
    return [torch.where(winner == rank, value, others[rank]) for rank in range(ranks)]


def _dyadic(noise: Tensor) -> Tensor:
    """Floats rounded to multiples of 1/64, so that integers are the sums of their parts without rounding."""
    return noise.mul(64).round().div(64) if noise.is_floating_point() else noise


def execute(
    example: Example,
    rule: Rule,
    strategy: Strategy,
    shards: Sequence[Sequence[Tensor]],
    grouping: Sequence[Grouping],
    ranks: int,
) -> list[tuple[Tensor, ...]]:
    """Every rank's results of one strategy.

    Args:
        example: the call.
        rule: its rule, for `size_argument` and `empty`.
        strategy: the placements of its operands and results.
        shards: for every operand, every rank's shard.
        grouping: for every result, the factor lengths of its dims.
        ranks: the number of ranks.
    """
    arguments, calls = [], []
    for rank in range(ranks):
        shapes = [physical_shape(g, p, ranks, rank) for g, p in zip(grouping, strategy.results, strict=True)]
        results = [TensorMeta(shape, meta.dtype) for shape, meta in zip(shapes, example.call.results, strict=True)]
        calls.append(attrs.evolve(example.call, results=tuple(results)))
        arguments.append(example.arguments([shard[rank] for shard in shards], rule.size_argument, shapes[0]))
    if strategy.body is not None:
        return run_body(strategy.body, calls, arguments)
    return [tensors_of(_run_operator(call, rule, *given)) for call, given in zip(calls, arguments, strict=True)]


def _run_operator(call: Call, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if rule.empty is not None and not all(tensor.numel() for tensor in tensors_of((*args, *kwargs.values()))):
        return rule.empty((), call, *args, **kwargs)
    return call.op(*args, **kwargs)


def run_body(
    body: Body, calls: Sequence[Call], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> list[tuple[Tensor, ...]]:
    """Run a local implementation on all ranks in lock step, from every rank's call (see `Body`) and local arguments.

    Raises:
        DivergenceError: ranks run different collectives, or different numbers of them.
    """
    mesh = Mesh((AXIS,), (len(arguments),))
    with axis_environment(mesh.axes):
        traces = [_traced(body, mesh, call, *given) for call, given in zip(calls, arguments, strict=True)]
    shards = list(zip(*(tensors_of((*args, *kwargs.values())) for args, kwargs in arguments), strict=True))
    ranks = [generate_lockstep(graph, mesh, [rank]).start(shards) for rank, graph in enumerate(traces)]
    return list(zip(*run_in_lockstep(mesh, ranks), strict=True))


def _traced(body: Body, mesh: Mesh, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """The results that are tensors of a local implementation on one rank, as a program."""

    def function(*tensors: Tensor) -> Sequence[Tensor]:
        given = iter(tensors)
        return tensors_of(body(mesh.names, call, *replace_tensors(args, given), **replace_tensors(kwargs, given)))

    return trace_flat(function, tensors_of((*args, *kwargs.values())))


def mismatch(
    shards: Sequence[Tensor], expected: Tensor, placement: Placement, grouping: Grouping, *, values: bool = True
) -> str | None:
    """Why the ranks' `shards` are not those of `expected` with this placement; None if they are."""
    ranks = len(shards)
    for rank, shard in enumerate(shards):
        shape = physical_shape(grouping, placement, ranks, rank)
        if tuple(shard.shape) != shape or shard.dtype != expected.dtype:
            return f"rank {rank} has {TensorMeta.of(shard)}, expected {TensorMeta(shape, expected.dtype)}"
    if not values:
        return None
    if isinstance(placement, Replicate):
        wrong = [rank for rank, shard in enumerate(shards) if not _close(shard, expected)]
        return f"rank {wrong[0]} differs" if wrong else None
    whole = _assemble(shards, placement, grouping).reshape(expected.shape)
    return None if _close(whole, expected) else "values differ"


def _assemble(shards: Sequence[Tensor], placement: Placement, grouping: Grouping) -> Tensor:
    if isinstance(placement, Shard):
        flat = [size for group in grouping for size in group]
        pieces = []
        for rank, shard in enumerate(shards):
            start, stop = chunk_bounds(flat[placement.dim], (len(shards),), (rank,))
            sizes = [stop - start if dim == placement.dim else size for dim, size in enumerate(flat)]
            pieces.append(shard.reshape(sizes))
        return torch.cat(pieces, placement.dim)
    stacked = torch.stack(list(shards))
    if isinstance(placement, Partial) and placement.op != "sum":
        return stacked.amax(0) if placement.op == "max" else stacked.amin(0)
    return stacked.sum(0, dtype=stacked.dtype)


def _close(actual: Tensor, expected: Tensor) -> bool:
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(actual, expected)
    rounding = torch.finfo(expected.dtype).eps  # the parts of a sum are some ten times as large as the sum
    return torch.allclose(actual, expected, max(1e-5, 2 * rounding), max(1e-6, 16 * rounding), equal_nan=True)
