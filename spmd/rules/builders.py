"""Builders of rules for families of operators whose factors depend on the call: pointwise, along dims, reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch

from spmd.core.placement import Reduction
from spmd.core.spec import TensorMeta
from spmd.ir.call import Call
from spmd.rules.notation import Rows, finish, operand_names, spell, tensor_arguments, term
from spmd.rules.rule import Axes, Body, Factors, Rule

T = TypeVar("T")


def dim_names(count: int) -> tuple[str, ...]:
    """Names for the factors of `count` dims, one each."""
    return tuple(f"d{i}" for i in range(count))


def argument_dims(call: Call, name: str, ndim: int) -> tuple[int, ...]:
    """The dims that the argument `name` gives, sorted and nonnegative; all dims for None or an empty list."""
    given: Any = call.argument(name)
    if given is None or given == [] or given == ():
        return tuple(range(ndim))
    listed = given if isinstance(given, (tuple, list)) else (given,)
    return tuple(sorted({dim % ndim for dim in listed})) if ndim else ()


def rule(
    make: Callable[[Call], Factors], *rows: Rows, size_argument: int | None = None, empty: Body | None = None
) -> Rule:
    """The rule that computes the factors of a call with `make` and adds the strategies of `rows`."""
    return Rule(lambda call: finish(call, make(call), rows), size_argument, empty)


def everywhere(dims: str, *rows: Rows) -> Rule:
    """The rule of an operator whose operands and results all have the term `dims`."""
    return rule(lambda call: spell(call, [dims] * len(call.operands), [dims] * len(call.results)), *rows)


def pointwise(*rows: Rows) -> Rule:
    """The rule of an elementwise operator whose operands broadcast.

    Args:
        rows: strategies that do not follow from factors, such as `linear("self")`.
    """
    return everywhere("...", *rows)


def replicated_only(*rows: Rows) -> Rule:
    """The rule of an operator that only runs replicated, except for the strategies of `rows`."""
    return everywhere("*", *rows)


def along(
    *rows: Rows,
    dims: str = "dim",
    body: Body | None = None,
    size_argument: int | None = None,
    empty: Body | None = None,
) -> Rule:
    """The rule of an operator that works along given dims, independently for each index of the others.

    Tensors have all dims (softmax, cat, sort, slice) or lack the given one (select, stack, unbind).

    Args:
        rows: strategies that do not follow from factors.
        dims: the name of the argument that gives the dims.
        body: the local implementation where a given dim is sharded; without it, given dims cannot be sharded.
        size_argument, empty: as in `Rule`.
    """

    def make(call: Call) -> Factors:
        ndim = max(meta.ndim for meta in (*call.operands, *call.results))
        names = dim_names(ndim)
        named = [names[dim] for dim in argument_dims(call, dims, ndim)]
        full, lacking = term(names, () if body else named), term(name for name in names if name not in named)

        def place(meta: TensorMeta) -> str:
            if meta.shape == (0,) and ndim != 1:  # torch.cat skips such operands
                return "_"
            return full if meta.ndim == ndim else lacking

        found = spell(call, map(place, call.operands), map(place, call.results))
        return attrs.evolve(found, bodies=dict.fromkeys(named, body) if body else {})

    return rule(make, *rows, size_argument=size_argument, empty=empty)


def reduction(
    kind: Reduction | None,
    *rows: Rows,
    dims: str | None = "dim",
    body: Body | None = None,
    empty: Body | None = None,
) -> Rule:
    """The rule of a reduction of the first operand over given dims.

    Args:
        kind: how partial results combine; None if they do not, and then reduced dims are sharded only with a `body`.
        rows: strategies that do not follow from factors.
        dims: the name of the argument that gives the dims (all, if it is None or left out); None if the operator
            reduces over all dims.
        body: the local implementation that computes the final result where a reduced dim is sharded.
        empty: as in `Rule`.
    """

    def make(call: Call) -> Factors:
        ndim = call.operands[0].ndim
        names = dim_names(ndim)
        over = argument_dims(call, dims, ndim) if dims else range(ndim)
        reduced = [names[dim] for dim in over]
        full, kept = term(names, reduced), term(name for name in names if name not in reduced)
        return attrs.evolve(
            spell(call, [term(names)], [full if meta.ndim == ndim else kept for meta in call.results]),
            reduce=dict.fromkeys(reduced, kind) if kind else {},
            replicate=frozenset() if kind or body else frozenset(reduced),
            bodies=dict.fromkeys(reduced, body) if body else {},
        )

    return rule(make, *rows, empty=empty)


def batched(operands: str, results: str, *rows: Rows, size_argument: int | None = None) -> Rule:
    """The rule of an operator on the trailing dims of its tensors, independently for each item of the batch.

    In `batched("2 1", "2")` an item has the last two dims of the first operand, the last one of the second and the last
    two of the result. The dims before them are the batch: they broadcast and can be sharded. Tensors with fewer dims
    than an item are replicated.

    Args:
        operands, results: for each operand and each result, how many trailing dims make up an item.
        rows: strategies that do not follow from factors.
        size_argument: as in `Rule`.
    """
    trailing, left = ([int(word) for word in words.split()] for words in (operands, results))

    def place(meta: TensorMeta, count: int) -> str:
        return "*" if meta.ndim < count else f"...{' _' * count}"

    def make(call: Call) -> Factors:
        core = dict(zip(tensor_arguments(call.op), trailing, strict=False))
        inside = [core[name] for name in operand_names(call)]
        found = spell(call, map(place, call.operands, inside), map(place, call.results, left))
        absent = any(meta.ndim < count or meta.shape == (0,) for meta, count in zip(call.results, left, strict=False))
        return attrs.evolve(found, independent=frozenset(found.sizes if absent else ()))

    return rule(make, *rows, size_argument=size_argument, empty=empty_results)


def zero_results(_: Axes, call: Call, *args: Any, **kwargs: Any) -> Any:
    """Zeros for every result, of the local shape.

    They depend on all operands: otherwise the collectives that produce these would be dead code on this rank alone.
    """
    tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
    made = (sum(x.new_zeros(meta.shape, dtype=meta.dtype) for x in tensors) for meta in call.results)
    if len(call.op._schema.returns) == 1:
        return next(made)
    mask = call.argument("output_mask", [True] * len(call.results))
    # kernels may return gradients that were not requested
    given = [True] * len(mask) if len(call.results) == len(mask) else mask
    return tuple(next(made) if wanted else None for wanted in given)


def requested(call: Call, *gradients: T) -> tuple[T | None, ...]:
    """The gradients, with None in place of those that the call's `output_mask` does not request."""
    return tuple(x if wanted else None for x, wanted in zip(gradients, call.argument("output_mask"), strict=True))


def empty_results(axes: Axes, call: Call, *args: Any, **kwargs: Any) -> Any:
    """Empty results if all results are empty, else the operator's: for operators that fail on an empty batch."""
    empty = not any(meta.numel for meta in call.results)
    return zero_results(axes, call, *args, **kwargs) if empty else call.op(*args, **kwargs)
