"""Indexing by tensors of positions: the dims of the positions and all but the indexed dims can be sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from spmd.core.placement import Partial, Reduction, Replicate, Shard
from spmd.core.spec import TensorMeta
from spmd.ir.call import Call
from spmd.rules.builders import dim_names
from spmd.rules.notation import Rows, by_call, factors, term
from spmd.rules.ops.lookup import look_up_items, missing, pick, shard_starts
from spmd.rules.ops.owners import read_index, read_items, write_index, write_items
from spmd.rules.partial import carry, increasing, keeps_max, keeps_min, linear
from spmd.rules.rule import Axes, Row, Rule, table

aten = torch.ops.aten

_COMBINED: Mapping[str, Reduction] = {"sum": "sum", "add": "sum", "amax": "max", "amin": "min"}


def _includes(call: Call) -> bool:
    """Whether the old value of an element takes part in the reduction of the values that are written to it."""
    return bool(call.argument("include_self", True))


def _combination(call: Call) -> Reduction | None:
    """The reduction over an element's old value and all values written to it; None if it is no sum, max or min."""
    if call.op in (aten.scatter_add.default, aten.index_add.default) or call.argument("accumulate", False):
        return "sum"
    return _COMBINED.get(call.argument("reduce", "")) if _includes(call) else None


def _written(call: Call, pattern: str, own: str, *rows: Rows, share: bool = True) -> Rule:
    """The rule of writes into the first operand at positions with the factors `own`.

    Where written values are reduced, each rank may write a shard of them, unless `share` is False.
    """
    kind = _combination(call)
    reductions: dict[str, Any] = {kind: own, "additive": "self"} if kind else {}
    return factors(pattern, *rows, replicate="" if kind and share else own, **reductions)


def _flows(source: str) -> Rows:
    """How Partial values pass through writes of the argument `source` into `self`."""
    both = f"self {source}"
    through: Mapping[Reduction | None, tuple[Rows, ...]] = {
        "sum": (linear(both), increasing("self")),
        "max": (keeps_max(both), increasing("self")),
        "min": (keeps_min(both), increasing("self")),
        None: (linear(both), increasing(both)),
    }

    def rows(call: Call) -> Iterator[Row]:
        reduce = call.argument("reduce", None)
        flows = through[_COMBINED.get(reduce) if reduce is not None else _combination(call)]
        if reduce == "mean":
            flows = (linear(both),)
        elif reduce in ("prod", "multiply"):
            flows = (linear("self"),) if _includes(call) else ()
        for flow in flows:
            yield from flow(call)

    return rows


def _terms(call: Call) -> tuple[str, str, str]:
    """The terms of the indexed tensor, of the positions and of the result in `self[indices]`."""
    indices = call.argument("indices")
    names = dim_names(call.operands[0].ndim)
    own = [f"i{i}" for i in range(max(meta.ndim for meta in indices if meta is not None))]
    at = [dim for dim, meta in enumerate(indices) if meta is not None]
    kept = [name for dim, name in enumerate(names) if dim not in at]
    # numpy's rule: if the indexed dims are not adjacent, the dims of the positions come first.
    start = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    return term(names, {names[dim] for dim in at}), term(own), term([*kept[:start], *own, *kept[start:]])


def _index(call: Call) -> Rule:
    whole, own, result = _terms(call)
    return factors(f"{whole}, [{own}] -> {result}", carry("self"), read_index)


def _is_mask(meta: TensorMeta | None) -> bool:
    return meta is not None and meta.dtype in (torch.bool, torch.uint8)


def _mask_put(call: Call) -> Rule:
    """Writes where masks are true.

    A single mask, with a value that is the same for all its elements, writes elementwise. Otherwise the number of true
    elements before a position decides which value is written there: neither the indexed dims nor the values' dim for
    them can be sharded.
    """
    indices, values = call.argument("indices"), call.argument("values")
    names = list(dim_names(call.operands[0].ndim))
    covered: list[str] = []
    firsts: list[int] = []
    dim = 0
    for meta in indices:
        if meta is not None:
            firsts.append(dim)
            covered += names[dim : dim + (meta.ndim if _is_mask(meta) else 1)]
        dim += meta.ndim if _is_mask(meta) else 1
    if any(_is_mask(meta) and meta.ndim == 0 for meta in indices):
        return factors("*, *, * -> *")
    kept = [name for name in names if name not in covered]
    start = names.index(covered[0]) if covered == names[firsts[0] : firsts[0] + len(covered)] else 0
    found = 1 if all(meta is None or _is_mask(meta) for meta in indices) else max(m.ndim for m in indices if m)
    result = [*kept[:start], *["_"] * found, *kept[start:]]
    if len(firsts) == 1 and _is_one(values, start, result):
        return factors(f"{term(names)}, {term(covered)}, [{term(result)}] -> {term(names)}", _flows("values"))
    whole = term(names, covered)
    return factors(f"{whole}, *, [{term(result)}] -> {whole}", _flows("values"))


def _is_one(values: TensorMeta, place: int, result: Sequence[str]) -> bool:
    """Whether values, aligned right with the dims `result`, lack the dim at `place` or have length 1 there."""
    dim = place - (len(result) - values.ndim)
    return dim < 0 or values.shape[dim] == 1


def _index_put(call: Call) -> Rule:
    if any(map(_is_mask, call.argument("indices"))):
        return _mask_put(call)
    whole, own, result = _terms(call)
    return _written(call, f"{whole}, [{own}], [{result}] -> {whole}", own, _flows("values"), write_index)


def _put(call: Call) -> Rule:
    _, index, source = call.operands
    alike = source.shape == index.shape
    return _written(call, f"*, ..., {'...' if alike else '*'} -> *", "...", _flows("source"), share=alike)


def _line(call: Call) -> tuple[str, str, str]:
    """The terms of `self`, of positions along its dim `dim`, and of the items at these positions."""
    names = dim_names(call.operands[0].ndim)
    dim = call.argument("dim") % max(len(names), 1)
    items = term("k" if i == dim else name for i, name in enumerate(names))
    return term(names, names[dim : dim + 1]), "k" if call.operands[1].ndim else "", items


def _index_select(call: Call) -> Rule:
    whole, positions, items = _line(call)
    return factors(f"{whole}, {positions} -> {items}", carry("self"), read_items)


def _index_add(call: Call) -> Rule:
    whole, positions, items = _line(call)
    items = items if call.operands[2].ndim else ""
    return _written(call, f"{whole}, {positions}, {items} -> {whole}", "k", _flows("source"), write_items)


def _elementwise(call: Call) -> tuple[str, str, str]:
    """The terms of `self`, of `index` and of what is written, in gather and scatter; the indexed dim of `index` is `k`.

    A dim that is not equally long in all operands cannot be sharded.
    """
    whole, index = call.operands[:2]
    if index.ndim != whole.ndim:  # torch accepts any shape of an empty index
        return "*", "*", "*"
    names = dim_names(whole.ndim)
    dim = call.argument("dim") % max(whole.ndim, 1)
    tensors = [meta for meta in call.operands if meta.ndim == whole.ndim]
    uneven = [name for i, name in enumerate(names) if i == dim or len({meta.shape[i] for meta in tensors}) > 1]
    source = call.operands[-1].shape
    positions = ["k" if i == dim else name for i, name in enumerate(names)]
    unlike = {*uneven, *("k" for i in range(whole.ndim) if i == dim and source[i : i + 1] != index.shape[i : i + 1])}
    return term(names, uneven), term(positions, uneven), term(positions, unlike)


def _gather(call: Call) -> Rule:
    whole, positions, _ = _elementwise(call)
    return factors(f"{whole}, {positions} -> {positions}", carry("self"), _cut_gathered)


def _scatter(*rows: Rows) -> Rule:
    def choose(call: Call) -> Rule:
        whole, positions, source = _elementwise(call)
        alike = len({meta.shape for meta in call.operands[1:]}) == 1
        flows = (*rows, write_items)
        return _written(call, f"{whole}, {positions}, {source} -> {whole}", "k", *flows, share=alike)

    return by_call(choose)


def _gather_body(
    axes: Axes, call: Call, x: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False
) -> torch.Tensor:
    starts = shard_starts(index, call.operands[0].shape[dim], axes, look_up_items)
    items, held = pick(x, dim, index, starts)
    return torch.where(held, items, missing(items))


def _cut_gathered(call: Call) -> Iterator[Row]:
    """Each rank gathers from its shard of the indexed dim; only if `index` has full length in the other dims."""
    whole, index = call.operands
    dim = call.argument("dim") % max(whole.ndim, 1)
    lengths = zip(whole.shape, index.shape, strict=False)
    if 0 < whole.ndim == index.ndim and all(i == dim or size == other for i, (size, other) in enumerate(lengths)):
        yield Row((Shard(dim), Replicate()), (Partial("sum"),), _gather_body)


INDEXING = table({
    "index.Tensor": by_call(_index),
    "index_put": by_call(_index_put),
    "index_select": by_call(_index_select),
    "index_add index_reduce": by_call(_index_add),
    "gather": by_call(_gather),
    "scatter.src scatter.reduce scatter_add scatter_reduce.two": _scatter(_flows("src")),
    "scatter.value": _scatter(linear("self value"), increasing("self")),
    "scatter.value_reduce": _scatter(_flows("value")),
    "take": factors("*, ... -> ...", carry("self")),
    "put": by_call(_put),
})  # fmt: skip
