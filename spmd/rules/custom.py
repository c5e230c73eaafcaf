"""A user's own operator: its rule, the rule of its gradient, and its batching, all derived from one factor pattern.

- *The gradient's rule.* Where a factor is sharded, each rank computes a slice of the results, or one summand of them.
  The gradient operator on the same slices computes the gradient of that slice or summand: for an operand that has the
  factor, a slice of the operand's gradient; for an operand that lacks it, a summand. Two kinds of factors cannot be
  sharded: those of `max` and `min`, as a rank does not know whether the extreme is in its shard, and those that a
  result is independent of, as every rank would contribute the same gradient.
- *Batching.* Elements along a factor that all results have are independent of each other, unless the factor is tied.
  So a batch of calls is one call with the batch folded into such a factor, if all batched operands have it too.
  Otherwise it is a loop over calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import attrs
import torch
from torch import Tensor

from spmd.errors import RuleError
from spmd.rules.notation import Pattern, Rows, Term, factors, tensor_arguments
from spmd.rules.partial import linear
from spmd.rules.rule import Rule, Table

_Result = TypeVar("_Result")


@attrs.frozen(eq=False)
class CustomOperator(Generic[_Result]):
    """A user's operator that is called like a function; `torch.func` differentiates and batches it, also inside jit.

    Args:
        op: the operator.
        pattern: its factors.
        rule: its rule.
        tied: the factors along which elements depend on each other: those that are reduced, replicated or independent.
        gradient: the operator that takes the cotangents of the results and then the arguments of `op`, and returns the
            gradients of the first tensor arguments; None if `op` cannot be differentiated.
    """

    op: torch._ops.OpOverload
    pattern: Pattern
    rule: Rule
    tied: frozenset[str]
    gradient: CustomOperator[Any] | None = None

    @property
    def rules(self) -> Table:
        """The rules of the operator and of its gradient: `jit(..., rules=RULES | mine.rules)`."""
        return {self.op: self.rule, **(self.gradient.rules if self.gradient else {})}

    def __call__(self, *args: Any) -> _Result:
        return self._function.apply(*args)  # type: ignore[no-any-return]

    @cached_property
    def _function(self) -> Any:
        """The autograd function: torch.library's autograd does not support torch.func, and vmap needs a rule."""
        operator = self

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(*args: Any) -> Any:
                return operator.op(*args)

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
                ctx.others = tuple(None if isinstance(x, Tensor) else x for x in inputs)

            @staticmethod
            def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
                if operator.gradient is None:
                    raise RuleError(f"{operator.op} has no gradient. Pass backward= to custom_operator.")
                pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
                args = [other if saved is None else saved for saved, other in pairs]
                found = iter(_listed(operator.gradient(*cotangents, *args)))
                return tuple(next(found, None) if term else None for term in operator._terms(args))

            @staticmethod
            def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
                moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(args, in_dims, strict=True)]
                batched = [dim is not None for dim in in_dims]
                found = operator._batch(info.batch_size, batched, moved)
                return (found[0], 0) if len(found) == 1 else (found or None, (0,) * len(found) or None)

        return Function

    def _terms(self, args: Sequence[Any]) -> list[Term | None]:
        """The term of every argument of a call; None for an argument that is not a tensor."""
        terms = dict(zip(tensor_arguments(self.op), self.pattern.operands, strict=True))
        return [terms.get(argument.name) for argument, _ in zip(self.op._schema.arguments, args, strict=False)]

    def _batch(self, size: int, batched: Sequence[bool], args: Sequence[Any]) -> tuple[Tensor, ...]:
        """The results of `size` calls, stacked in a new first dim; batched arguments have such a dim too."""
        terms = self._terms(args)
        factor = self._folding([term for term, inside in zip(terms, batched, strict=True) if term and inside])
        if factor is None:
            calls = [
                self(*(x[i] if inside else x for x, inside in zip(args, batched, strict=True))) for i in range(size)
            ]
            return tuple(map(torch.stack, zip(*map(_listed, calls), strict=True)))

        def fold(x: Any, inside: bool, term: Term | None) -> Any:
            if term is None or x is None or (factor,) not in term.dims:
                return x
            at, whole = term.dims.index((factor,)), x if inside else x.expand(size, *x.shape)
            return whole.movedim(0, at).flatten(at, at + 1)

        def unfold(x: Tensor, term: Term) -> Tensor:
            at = term.dims.index((factor,))
            return x.unflatten(at, (size, x.shape[at] // size)).movedim(at, 0)

        return tuple(map(unfold, _listed(self(*map(fold, args, batched, terms))), self.pattern.results))

    def _folding(self, batched: Sequence[Term]) -> str | None:
        """A factor that is a dim of all results and of all batched operands, and is not tied; None if there is none."""
        shared = [set(term.dims) for term in (*batched, *self.pattern.results)]
        names = [dims[0] for dims in self.pattern.results[0].dims if len(dims) == 1 and all(dims in t for t in shared)]
        free = (name for name in names if name.isidentifier() and name != "_" and name not in self.tied)
        return next(free, None)


def custom_operator(
    op: Callable[..., _Result], pattern: str, *rows: Rows, backward: Any = None, **kinds: str
) -> CustomOperator[_Result]:
    """Make an operator of your own shardable, differentiable and batchable, from one factor pattern.

    Args:
        op: the result of `torch.library.custom_op`, or an operator of `torch.ops`. Its results are tensors.
        pattern, rows: as in `factors`. Each operand in `pattern` is one tensor.
        kinds: `sum`, `max`, `min`, `replicate` and `independent`, as in `factors`.
        backward: the operator that computes the gradient. It takes a cotangent for every result and then all arguments
            of `op`, and returns the gradients of the first tensor arguments, or of all of them.

    Returns:
        A function of the arguments of `op`; its `rules` are to be passed to `jit`.

    Raises:
        RuleError: the pattern is malformed, `op` or `backward` is not an operator, or the tensors that `backward` takes
            and returns do not fit `pattern`.

    >>> @torch.library.custom_op("docs::outer", mutates_args=())
    ... def outer(x: Tensor, y: Tensor) -> Tensor:
    ...     return x[:, None] * y
    >>> custom_operator(outer, "i, j -> i j")(torch.ones(2), torch.ones(3)).shape
    torch.Size([2, 3])
    """
    parsed = Pattern.parse(pattern)
    fixed = frozenset(word for kind, words in kinds.items() if kind != "sum" for word in words.split())
    rule = factors(pattern, *rows, **kinds)  # type: ignore[arg-type]
    gradient = None if backward is None else _gradient(_overload(backward), parsed, fixed)
    return CustomOperator(_overload(op), parsed, rule, fixed | set(kinds.get("sum", "").split()), gradient)


def _gradient(op: torch._ops.OpOverload, forward: Pattern, fixed: frozenset[str]) -> CustomOperator[Any]:
    """The gradient operator, from cotangents and operands to gradients; all factors can be sharded except `fixed`."""
    given = (*forward.results, *forward.operands)
    names, count = tensor_arguments(op), len(op._schema.returns)
    if len(names) != len(given) or count > len(forward.operands):
        raise RuleError(
            f"{op} takes {len(names)} tensors and gives {count}; a gradient of {forward.text!r} takes {len(given)}, "
            f"cotangents first, and gives at most {len(forward.operands)}."
        )
    left, right = forward.text.split("->")
    pattern = f"{right}, {left} -> {', '.join(left.split(',')[:count])}"
    summed = {word for term in given for names in term.dims for word in names} - fixed - {"_", "1", "*"}
    cotangents = linear(" ".join(names[: len(forward.results)]))
    rule = factors(pattern, cotangents, sum=" ".join(sorted(summed)), replicate=" ".join(sorted(fixed)))
    return CustomOperator(op, Pattern.parse(pattern), rule, fixed)


def _overload(op: Any) -> torch._ops.OpOverload:
    found = getattr(op, "_opoverload", getattr(op, "default", op))
    if not isinstance(found, torch._ops.OpOverload):
        raise RuleError(f"An operator must come from torch.library.custom_op or torch.ops (got {op!r:.60}).")
    return found


def _listed(results: Any) -> Sequence[Tensor]:
    return [results] if isinstance(results, Tensor) else results or ()
