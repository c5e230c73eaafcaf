"""Indexing by tensors of positions: the indexed dims are not cut, all others and the positions are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from spmd.placement import Partial, Reduction, Replicate, Shard
from spmd.rules.builders import aligned, cut_all, dim_names, rule
from spmd.rules.lookup import pick
from spmd.rules.notation import Rows
from spmd.rules.partial import carry, increasing, keeps_max, keeps_min, linear
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
    return _written(call, operands, sizes, own)


def _put(call: Call) -> Factors:
    whole, index, source = call.operands
    own = [f"i{i}" for i in range(index.ndim)]
    placed = cut_all(index.shape, own)
    operands = (((),) * whole.ndim, placed, placed if source.shape == index.shape else ((),) * source.ndim)
    shared = own if source.shape == index.shape else []
    return _written(call, operands, dict(zip(own, index.shape, strict=True)), own, shared)


def _take(call: Call) -> Factors:
    whole, index = call.operands
    own = [f"i{i}" for i in range(index.ndim)]
    placed = cut_all(index.shape, own)
    return Factors((((),) * whole.ndim, placed), (placed,), dict(zip(own, index.shape, strict=True)))


_COMBINED: Mapping[str, Reduction] = {"sum": "sum", "add": "sum", "amax": "max", "amin": "min"}


def _given(call: Call, name: str, otherwise: Any) -> Any:
    return call.argument(name) if any(argument.name == name for argument in call.op._schema.arguments) else otherwise


def _includes(call: Call) -> bool:
    """Whether what a place holds counts beside what is written there."""
    return bool(_given(call, "include_self", True))


def _combination(call: Call) -> Reduction | None:
    """How a place combines what it holds with all that is written there; None if it does not, or in no simple way."""
    if call.op in _ADDING or _given(call, "accumulate", False):
        return "sum"
    return _COMBINED.get(_given(call, "reduce", "")) if _includes(call) else None


def _written(
    call: Call,
    operands: Sequence[FactorDims],
    sizes: Mapping[str, int],
    own: Sequence[str],
    shared: Sequence[str] | None = None,
) -> Factors:
    """Factors of writes into the first operand at places with the factors `own`.

    Where writes combine, each rank may write a share of them, along the factors `shared`: by default all of `own`.
    """
    kind = _combination(call)
    reduce = dict.fromkeys(own if shared is None else shared, kind) if kind else {}
    fixed = frozenset(own) - reduce.keys()
    additive = frozenset({0}) if reduce else frozenset()
    return Factors(tuple(operands), (operands[0],), sizes, reduce, fixed, additive)


def _flows(source: str) -> Rows:
    """How Partial values go through writes of the argument `source` into `self`."""
    both = f"self {source}"
    through: Mapping[Reduction | None, tuple[Rows, ...]] = {
        "sum": (linear(both), increasing("self")),
        "max": (keeps_max(both), increasing("self")),
        "min": (keeps_min(both), increasing("self")),
        None: (linear(both), increasing(both)),
    }

    def rows(call: Call) -> Iterator[Row]:
        reduce = _given(call, "reduce", None)
        flows = through[_COMBINED.get(reduce) if reduce is not None else _combination(call)]
        if reduce == "mean":
            flows = (linear(both),)
        elif reduce in ("prod", "multiply"):
            flows = (linear("self"),) if _includes(call) else ()
        for flow in flows:
            yield from flow(call)

    return rows


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
    return _written(call, (target, (("k",),) * index.ndim, placed[: source.ndim]), sizes, ["k"])


def _elementwise_index(call: Call) -> tuple[FactorDims, FactorDims, dict[str, int]]:
    """The dims of `self` and of `index` in gather and scatter; the indexed dim of `index` is the factor `k`.

    Other dims of `index` may be shorter than those of `self`; then neither is cut.
    """
    whole, index = call.operands[:2]
    if index.ndim != whole.ndim:  # torch takes any shape of an index without elements
        return ((),) * whole.ndim, ((),) * index.ndim, {}
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
    own = ["k"] if "k" in sizes else []
    return _written(call, operands, sizes, own, own if len({meta.shape for meta in call.operands[1:]}) == 1 else [])


def _gather_body(
    axes: tuple[str, ...], call: Call, x: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False
) -> torch.Tensor:
    return pick(x, dim, index, call.operands[0].shape[dim], axes)


def _cut_gathered(call: Call) -> Iterator[Row]:
    """Each rank gathers what its shard of the indexed dim holds; only for whole positions in the other dims."""
    whole, index = call.operands
    dim = call.argument("dim") % max(whole.ndim, 1)
    lengths = zip(whole.shape, index.shape, strict=False)
    if 0 < whole.ndim == index.ndim and all(i == dim or size == other for i, (size, other) in enumerate(lengths)):
        yield Row((Shard(dim), Replicate()), (Partial("sum"),), _gather_body)


_ADDING = frozenset({aten.scatter_add.default, aten.index_add.default})

INDEXING: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.index.Tensor: rule(_index, carry("self")),
        aten.index_put.default: rule(_index_put, _flows("values")),
        aten.index_select.default: rule(_index_select, carry("self")),
        aten.index_add.default: rule(_index_add, _flows("source")),
        aten.index_reduce.default: rule(_index_add, _flows("source")),
        aten.gather.default: rule(_gather, carry("self"), _cut_gathered),
        aten.scatter.src: rule(_scatter, _flows("src")),
        aten.scatter.value: rule(_scatter, linear("self value"), increasing("self")),
        aten.scatter.reduce: rule(_scatter, _flows("src")),
        aten.scatter.value_reduce: rule(_scatter, _flows("value")),
        aten.scatter_add.default: rule(_scatter, _flows("src")),
        aten.scatter_reduce.two: rule(_scatter, _flows("src")),
        aten.take.default: rule(_take, carry("self")),
        aten.put.default: rule(_put, _flows("source")),
    }
)
