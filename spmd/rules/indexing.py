"""Indexing by tensors of positions: the indexed dims are not cut, all others and the positions are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from spmd.placement import Partial, Replicate, Shard
from spmd.rules.builders import aligned, dim_names, rule
from spmd.rules.lookup import pick
from spmd.rules.partial import carry, increasing, linear
from spmd.rules.rule import Call, FactorDims, Factors, Row, Rule
from spmd.spec import TensorMeta

aten = torch.ops.aten


def _index_shape(positions: Sequence[TensorMeta]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(meta.shape for meta in positions)))


def _indexed(whole: TensorMeta, indices: Sequence[TensorMeta | None]) -> tuple[list[str], list[str], dict[str, int]]:
    """The factors of the result of `whole[indices]`, those of the index dims, and the lengths of all."""
    shape = _index_shape([meta for meta in indices if meta is not None])
    own = [f"i{i}" for i in range(len(shape))]
    names = dim_names(whole.ndim)
    at = [dim for dim, meta in enumerate(indices) if meta is not None]
    kept = [name for dim, name in enumerate(names) if dim not in at]
    # numpy's rule: where the indexed dims are not neighbours, the index dims come first.
    start = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    sizes = {name: whole.shape[int(name[1:])] for name in kept} | dict(zip(own, shape, strict=True))
    return [*kept[:start], *own, *kept[start:]], own, sizes


def _positions(indices: Sequence[TensorMeta | None], own: Sequence[str], sizes: Mapping[str, int]) -> list[FactorDims]:
    return [aligned(meta, own, [sizes[name] for name in own]) for meta in indices if meta is not None]


def _whole(whole: TensorMeta, sizes: Mapping[str, int]) -> FactorDims:
    return tuple((name,) if name in sizes else () for name in dim_names(whole.ndim))


def _index(call: Call) -> Factors:
    whole, indices = call.operands[0], call.argument("indices")
    result, own, sizes = _indexed(whole, indices)
    operands = (_whole(whole, sizes), *_positions(indices, own, sizes))
    return Factors(operands, (tuple((name,) for name in result),), sizes)


def _index_put(call: Call) -> Factors:
    whole, values, indices = call.operands[0], call.argument("values"), call.argument("indices")
    result, own, sizes = _indexed(whole, indices)
    placed = aligned(values, result, [sizes[name] for name in result])
    operands = (_whole(whole, sizes), *_positions(indices, own, sizes), placed)
    return _accumulated(call.argument("accumulate"), operands, (operands[0],), sizes, own)


def _replaced(call: Call) -> Iterator[Row]:
    """Where values replace elements rather than add to them, maxima and minima stay."""
    if not call.argument("accumulate"):
        yield from increasing("self values")(call)


def _accumulated(
    add: bool,
    operands: Sequence[FactorDims],
    results: Sequence[FactorDims],
    sizes: Mapping[str, int],
    own: Sequence[str],
) -> Factors:
    """Factors of writes into the first operand: where they add, each rank may write a share of them."""
    reduce: Any = dict.fromkeys(own, "sum") if add else {}
    fixed = frozenset() if add else frozenset(own)
    return Factors(tuple(operands), tuple(results), sizes, reduce, fixed, frozenset({0}) if add else frozenset())


def _index_select(call: Call) -> Factors:
    whole, result = call.operands[0], call.results[0]
    names = dim_names(whole.ndim)
    dim = call.argument("dim") % max(whole.ndim, 1)
    sizes = {name: size for i, (name, size) in enumerate(zip(names, result.shape, strict=True)) if i != dim}
    placed = tuple(("k",) if i == dim else (name,) for i, name in enumerate(names))
    positions: FactorDims = (("k",),) if call.operands[1].ndim else ((),) * call.operands[1].ndim
    sizes["k"] = call.operands[1].numel
    return Factors((_whole(whole, sizes), positions), (placed,), sizes)


def _index_add(call: Call) -> Factors:
    whole, index, source = call.operands
    dim = call.argument("dim") % max(whole.ndim, 1)
    names = dim_names(whole.ndim)
    sizes = {name: size for i, (name, size) in enumerate(zip(names, whole.shape, strict=True)) if i != dim}
    sizes["k"] = index.numel
    placed = tuple(("k",) if i == dim else (name,) for i, name in enumerate(names))
    target = _whole(whole, sizes)
    return _accumulated(True, (target, (("k",),) * index.ndim, placed[: source.ndim]), (target,), sizes, ["k"])


def _elementwise_index(call: Call) -> tuple[FactorDims, FactorDims, dict[str, int]]:
    """The dims of `self` and of `index` in gather and scatter; the indexed dim of `index` is the factor `k`.

    Other dims of `index` may be shorter than those of `self`; then neither is cut.
    """
    whole, index = call.operands[:2]
    dim = call.argument("dim") % max(whole.ndim, 1)
    names = dim_names(whole.ndim)
    tensors = [meta for meta in call.operands if meta.ndim == whole.ndim]
    equal = {names[i] for i in range(whole.ndim) if len({meta.shape[i] for meta in tensors}) == 1 and i != dim}
    sizes = {name: size for name, size in zip(names, whole.shape, strict=True) if name in equal}
    positions = tuple(("k",) if i == dim else (name,) if name in equal else () for i, name in enumerate(names))
    if index.ndim:
        sizes["k"] = index.shape[dim]
    return _whole(whole, sizes), positions, sizes


def _gather(call: Call) -> Factors:
    whole, positions, sizes = _elementwise_index(call)
    return Factors((whole, positions), (positions,), sizes)


def _scatter(call: Call) -> Factors:
    whole, positions, sizes = _elementwise_index(call)
    operands = (whole, *(positions for _ in call.operands[1:]))
    adds = call.op is aten.scatter_add.default
    if adds and call.operands[1].shape != call.operands[2].shape:
        adds = False
    return _accumulated(adds, operands, (whole,), sizes, ["k"] if "k" in sizes else [])


def _gather_body(
    axes: tuple[str, ...], call: Call, x: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False
) -> torch.Tensor:
    return pick(x, dim, index, call.operands[0].shape[dim], axes)


def _cut_gathered(call: Call) -> Iterator[Row]:
    """Each rank gathers what its shard of the indexed dim holds; only for whole positions in the other dims."""
    whole, index = call.operands
    dim = call.argument("dim") % max(whole.ndim, 1)
    if whole.ndim and all(i == dim or size == index.shape[i] for i, size in enumerate(whole.shape)):
        yield Row((Shard(dim), Replicate()), (Partial("sum"),), _gather_body)


INDEXING: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.index.Tensor: rule(_index, carry("self")),
        aten.index_put.default: rule(_index_put, linear("self values"), _replaced),
        aten.index_select.default: rule(_index_select, carry("self")),
        aten.index_add.default: rule(_index_add, linear("self source")),
        aten.gather.default: rule(_gather, carry("self"), _cut_gathered),
        aten.scatter.src: rule(_scatter, carry("self src")),
        aten.scatter.value: rule(_scatter, linear("self value"), increasing("self")),
        aten.scatter_add.default: rule(_scatter, linear("self src")),
    }
)
