"""Calls of loops and branches in a trace, with the rules by which transforms act on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import TransformType, peek_interpreter_stack

from spmd.core.spec import TensorMeta
from spmd.tracing.autograd_functions import needs_grad
from spmd.tracing.closures import ClosureLifting
from spmd.tracing.loops.batching import batched
from spmd.tracing.loops.closed import close
from spmd.tracing.loops.constructs import Branch, Construct, Loop, While, with_equal_inputs
from spmd.tracing.loops.derivatives import Differentiated, From, differentiated
from spmd.tracing.loops.forward_mode import dual
from spmd.tracing.running import running_trace

Tensors = list[torch.Tensor]


def traced_scan(
    body: Callable[[Tensors, Tensors], tuple[Tensors, Tensors]],
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    length: int,
    reverse: bool,
) -> tuple[Tensors, Tensors]:
    """A loop of known length.

    Args:
        body: from carries and one item of each of `xs` to the next carries, of equal shapes and dtypes, and results.
        init: the first carries.
        xs: the items, stacked along dim 0.
        length: how many items there are.
        reverse: whether the last item comes first.

    Returns:
        The last carries, and the results of all trips, stacked along dim 0.
    """
    count = len(init)

    def flat(*tensors: torch.Tensor) -> Tensors:
        carries, ys = body(list(tensors[:count]), list(tensors[count:]))
        return [*carries, *ys]

    closed = close(flat, *init, *(x.select(0, 0) if length else x.new_empty(x.shape[1:]) for x in xs))
    loop = Loop(closed.body, count, len(xs), length, reverse)
    if not length:
        device = next((x.device for x in (*init, *xs)), None)
        stacked = loop.results[count:]
        return list(init), [torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in stacked]
    results = apply(loop, *init, *xs, *closed.closed_over)
    return results[:count], results[count:]


def traced_while(
    condition: Callable[[Tensors], torch.Tensor], body: Callable[[Tensors], Tensors], init: Sequence[torch.Tensor]
) -> Tensors:
    """A loop whose length is data.

    Args:
        condition: from carries to a 0-d boolean tensor.
        body: from carries to the next ones, of equal shapes and dtypes.
        init: the first carries.
    """
    tested = close(lambda *carries: [condition(list(carries))], *init)
    closed = close(lambda *carries: body(list(carries)), *init)
    programs = with_equal_inputs(len(init), tested.body, closed.body)
    loop = While(*programs, len(init))
    return apply(loop, *init, *tested.closed_over, *closed.closed_over)


def traced_cond(
    predicate: bool | torch.Tensor, on_true: Callable[[], Tensors], on_false: Callable[[], Tensors]
) -> Tensors:
    """The results of one of two functions.

    Args:
        predicate: a 0-d boolean tensor; or what is known to Python.
        on_true, on_false: the functions; their results have equal shapes and dtypes.
    """
    sides = close(on_true), close(on_false)  # both, so that both are checked
    if isinstance(predicate, bool):
        return on_true() if predicate else on_false()
    programs = with_equal_inputs(0, sides[0].body, sides[1].body)
    return apply(Branch(programs), predicate, *sides[0].closed_over, *sides[1].closed_over)


def apply(construct: Construct, *operands: torch.Tensor) -> Tensors:
    """Call a construct on tensors of the trace that is running, or of one around it."""
    trace = running_trace()
    assert isinstance(trace, ClosureLifting)
    operands = tuple(map(trace.take, operands))
    is_plain = isinstance(construct, While) or not _is_below_grad() or not torch.is_grad_enabled()
    if is_plain or not any(map(needs_grad, operands)) or not any(map(_is_differentiable, construct.results)):
        return list(_Call.apply(construct, None, *operands))
    found = differentiated(construct, apply)
    results = _Call.apply(found.forward, found, *operands, *found.constants)[: found.count]
    return [x.clone() for x in results]  # to which the function may write, where the derivative reads what it was


def _is_differentiable(x: torch.Tensor | TensorMeta) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def _is_below_grad() -> bool:
    """Whether the innermost transform that acts is one of gradients, or none does: others have rules of their own."""
    innermost = peek_interpreter_stack()
    return innermost is None or innermost.key() == TransformType.Grad


class _Call(torch.autograd.Function):
    """A call of a construct."""

    @staticmethod
    def forward(construct: Construct, how: Differentiated | None, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        trace = running_trace()
        assert isinstance(trace, ClosureLifting)
        recorder, device = trace.recorder, operands[0].device if operands else torch.device("cpu")
        given = [recorder.value(trace.finish(trace.take(operand))) for operand in operands]
        return tuple(trace.made(value, device) for value in construct.record(recorder.add, given, recorder.line()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        construct, how, *operands = inputs
        ctx.construct, ctx.how, ctx.count = construct, how, len(operands)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *output)
        ctx.save_for_forward(*operands)
        ctx.mark_non_differentiable(*(x for x in output if not _is_differentiable(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        operands, results = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        return None, None, *_gradients(ctx.construct, ctx.how, operands, results, cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        if not any(map(_is_differentiable, ctx.construct.results)):
            return (None,) * len(ctx.construct.results)
        return dual(ctx.construct, ctx.saved_tensors, tangents[2:], apply)

    @staticmethod
    def vmap(info: Any, in_dims: Any, construct: Construct, how: Any, *operands: torch.Tensor) -> Any:
        return batched(construct, info, in_dims[2:], operands, apply)


def _gradients(
    construct: Construct,
    how: Differentiated | None,
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The cotangents of operands."""
    of_results = cotangents if how is None else cotangents[how.count :]
    if any(cotangent is not None for cotangent in of_results):
        # Only now the derivative of a derivative is asked for, or of what one reads. What it reads, is computed anew.
        again = differentiated(construct, apply)
        given = (*operands, *again.constants)
        rest = [None] * (len(cotangents) - len(of_results))
        found = _gradients(again.forward, again, given, _Call.apply(again.forward, again, *given), [*rest, *of_results])
        if how is None:
            return found[: len(operands)]
        first = _gradients(construct, how, operands, results, [*cotangents[: how.count], *[None] * len(of_results)])
        return [_sum(x, y) for x, y in zip(first, found, strict=False)]
    if how is None or all(cotangent is None for cotangent in cotangents):
        return [None] * len(operands)
    take = {
        From.OPERAND: lambda number: operands[number],
        From.RESULT: lambda number: results[number],
        From.ZERO: lambda number: torch.zeros_like(operands[number]),
        From.COTANGENT: lambda number: _or_zeros(cotangents[number], results[number]),
    }
    gradients = _Call.apply(how.backward, None, *(take[kind](number) for kind, number in how.takes))
    by_operand = dict(zip(how.inputs, gradients, strict=True))
    return [by_operand.get(number) for number in range(len(operands))]


def _sum(x: torch.Tensor | None, y: torch.Tensor | None) -> torch.Tensor | None:
    return x if y is None else y if x is None else x + y


def _or_zeros(cotangent: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if cotangent is None else cotangent
