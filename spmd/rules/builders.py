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
    """The dims that an argument names, not negative; all dims for None or an empty list."""
    given: Any = call.argument(name)
    if given is None or given == [] or given == ():
        return tuple(range(ndim))
    listed = given if isinstance(given, (tuple, list)) else (given,)
    return tuple(sorted({dim % ndim for dim in listed})) if ndim else ()


def rule(
    make: Callable[[Call], Factors], *rows: Rows, size_argument: int | None = None, empty: Body | None = None
) -> Rule:
    """The rule that finds the factors of a call with `make` and adds `rows`."""
    return Rule(lambda call: finish(call, make(call), rows), size_argument, empty)


def everywhere(dims: str, *rows: Rows) -> Rule:
    """The rule of an operator all of whose operands and results have the same term `dims`."""
    return rule(lambda call: spell(call, [dims] * len(call.operands), [dims] * len(call.results)), *rows)


def pointwise(*rows: Rows) -> Rule:
    """The rule of an operator that computes every element from the operands' elements there, broadcast."""
    return everywhere("...", *rows)


def whole(*rows: Rows) -> Rule:
    """The rule of an operator that cannot be cut, but for `rows`."""
    return everywhere("*", *rows)


def along(
    *rows: Rows,
    dims: str = "dim",
    body: Body | None = None,
    size_argument: int | None = None,
    empty: Body | None = None,
) -> Rule:
    """The rule of an operator that works along the dims which the argument `dims` names, each line on its own.

    Tensors have the full number of dims (softmax, cat, sort, slice) or lack the one named (select, stack, unbind). The
    named dims cannot be cut, unless `body` says what a rank computes then.
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
    """The rule of a reduction of `self` over the dims that the argument `dims` names (all, if it is None or left out).

    `kind` is how partial results combine; None if they do not, and then reduced dims are cut only with a `body` that
    computes the final result. `empty` is as in `Rule`.
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
    """The rule of an operator on the trailing dims of its tensors, each item of the batch on its own.

    `batched("2 1", "2")`: two dims of the first operand and one of the second make up an item, and two of the result.
    The dims before them are the batch; they broadcast and are cut. Tensors of fewer dims are not.
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

    return rule(make, *rows, size_argument=size_argument, empty=vanish)


def nothing(_: Axes, call: Call, *args: Any, **kwargs: Any) -> Any:
    """Zeros for every result, each made from all operands: a rank must not drop the moves that others run."""
    tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
    made = (sum(x.new_zeros(meta.shape, dtype=meta.dtype) for x in tensors) for meta in call.results)
    if len(call.op._schema.returns) == 1:
        return next(made)
    asked = call.argument("output_mask", [True] * len(call.results))
    given = [True] * len(asked) if len(call.results) == len(asked) else asked  # kernels may give more than is asked
    return tuple(next(made) if wanted else None for wanted in given)


def asked(call: Call, *gradients: T) -> tuple[T | None, ...]:
    """Of all gradients, those for which the call asks."""
    return tuple(x if wanted else None for x, wanted in zip(gradients, call.argument("output_mask"), strict=True))


def vanish(axes: Axes, call: Call, *args: Any, **kwargs: Any) -> Any:
    """Results without elements, where they have none: for operators that refuse an empty batch."""
    empty = not any(meta.numel for meta in call.results)
    return nothing(axes, call, *args, **kwargs) if empty else call.op(*args, **kwargs)
