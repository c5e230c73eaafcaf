"""Builders of rules for families of operators whose factors depend on the call: pointwise, along dims, reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from spmd.errors import RuleError
from spmd.placement import Reduction
from spmd.rules.notation import Rows, finish, operand_names, tensor_arguments
from spmd.rules.rule import Body, Call, FactorDims, Factors, Rule
from spmd.spec import TensorMeta


def dim_names(count: int) -> tuple[str, ...]:
    """Names for the factors of `count` dims, one each."""
    return tuple(f"d{i}" for i in range(count))


def cut_all(shape: Sequence[int], names: Sequence[str], fixed: Iterable[str] = ()) -> FactorDims:
    """One factor a dim; none for the dims in `fixed`."""
    return tuple(() if name in fixed else (name,) for name, _ in zip(names, shape, strict=True))


def aligned(meta: TensorMeta, names: Sequence[str], shape: Sequence[int]) -> FactorDims:
    """The factors of a tensor that broadcasts to `shape`, whose factors are `names`; RuleError if it does not."""
    offset = len(shape) - meta.ndim
    if offset < 0 or any(size not in (1, full) for size, full in zip(meta.shape, shape[offset:], strict=True)):
        raise RuleError(f"A tensor {meta} does not broadcast to {list(shape)}. Pass a rule that fits this operator.")
    pairs = zip(meta.shape, shape[offset:], names[offset:], strict=True)
    return tuple((name,) if size == full else () for size, full, name in pairs)


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


def pointwise(*rows: Rows) -> Rule:
    """The rule of an operator that computes every element from the operands' elements there, broadcast."""
    return rule(_pointwise, *rows)


def _pointwise(call: Call) -> Factors:
    shape = max((meta.shape for meta in call.results), key=len)
    names = dim_names(len(shape))
    return Factors(
        tuple(aligned(meta, names, shape) for meta in call.operands),
        tuple(aligned(meta, names, shape) for meta in call.results),
        dict(zip(names, shape, strict=True)),
    )


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
        tensors = (*call.operands, *call.results)
        ndim = max(meta.ndim for meta in tensors)
        names = dim_names(ndim)
        named = {names[dim] for dim in argument_dims(call, dims, ndim)}
        whole = next(meta for meta in tensors if meta.ndim == ndim)
        sizes = {name: size for name, size in zip(names, whole.shape, strict=True) if body or name not in named}
        fixed = () if body else named

        def place(meta: TensorMeta) -> FactorDims:
            if meta.shape == (0,) and ndim != 1:  # torch.cat skips such operands
                return ((),)
            kept = names if meta.ndim == ndim else [name for name in names if name not in named]
            return cut_all(meta.shape, kept, fixed)

        bodies = dict.fromkeys(sorted(named), body) if body else {}
        operands, results = tuple(map(place, call.operands)), tuple(map(place, call.results))
        return Factors(operands, results, sizes, bodies=bodies)

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
        (operand,) = call.operands
        names = dim_names(operand.ndim)
        over = argument_dims(call, dims, operand.ndim) if dims else tuple(range(operand.ndim))
        reduced = [names[dim] for dim in over]
        kept = [name for name in names if name not in reduced]

        def place(meta: TensorMeta) -> FactorDims:
            keepdim = meta.ndim == operand.ndim
            return cut_all(meta.shape, names if keepdim else kept, reduced)

        return Factors(
            (cut_all(operand.shape, names),),
            tuple(map(place, call.results)),
            dict(zip(names, operand.shape, strict=True)),
            reduce=dict.fromkeys(reduced, kind) if kind else {},
            replicate=frozenset() if kind or body else frozenset(reduced),
            bodies=dict.fromkeys(reduced, body) if body else {},
        )

    return rule(make, *rows, empty=empty)


def nothing(_: tuple[str, ...], call: Call, *args: Any, **kwargs: Any) -> Any:
    """Zeros for every result, each made from all operands: a rank must not drop the moves that others run."""
    tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
    made = tuple(sum(x.new_zeros(meta.shape, dtype=meta.dtype) for x in tensors) for meta in call.results)
    return made[0] if len(call.op._schema.returns) == 1 else made


def vanish(axes: tuple[str, ...], call: Call, *args: Any, **kwargs: Any) -> Any:
    """Results without elements, where they have none: for operators that refuse an empty batch."""
    empty = not any(meta.numel for meta in call.results)
    return nothing(axes, call, *args, **kwargs) if empty else call.op(*args, **kwargs)


def batched(operands: str, results: str, *rows: Rows, size_argument: int | None = None) -> Rule:
    """The rule of an operator on the trailing dims of its tensors, each item of the batch on its own.

    `batched("2 1", "2")`: two dims of the first operand and one of the second make up an item, and two of the result.
    The dims before them are the batch; they broadcast and are cut. Tensors of fewer dims are not.
    """
    trailing, left = ([int(word) for word in words.split()] for words in (operands, results))

    def make(call: Call) -> Factors:
        core = dict(zip(tensor_arguments(call.op), trailing, strict=False))
        given = [(meta, core[name]) for name, meta in zip(operand_names(call), call.operands, strict=True)]
        pairs = [*given, *zip(call.results, left, strict=False)]
        shape = torch.broadcast_shapes(*(meta.shape[: max(meta.ndim - count, 0)] for meta, count in pairs))
        names = dim_names(len(shape))

        def place(meta: TensorMeta, count: int) -> FactorDims:
            if meta.ndim < count:
                return ((),) * meta.ndim
            lead = TensorMeta(meta.shape[: meta.ndim - count], meta.dtype)
            return (*aligned(lead, names, shape), *((),) * count)

        placed = [place(*pair) for pair in pairs]
        absent = any(meta.ndim < count or meta.shape == (0,) for meta, count in pairs[len(given) :])
        return Factors(
            tuple(placed[: len(given)]),
            tuple(placed[len(given) :]),
            dict(zip(names, shape, strict=True)),
            independent=frozenset(names if absent else ()),
        )

    return rule(make, *rows, size_argument=size_argument, empty=vanish)
