"""Calls of loops and branches in a trace, with the rules by which transforms act on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

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
    loop = Loop(closed.graph, count, len(xs), length, reverse)
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
    programs = with_equal_inputs(len(init), tested.graph, closed.graph)
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
    programs = with_equal_inputs(0, sides[0].graph, sides[1].graph)
    return apply(Branch(programs), predicate, *sides[0].closed_over, *sides[1].closed_over)


def apply(construct: Construct, *operands: torch.Tensor) -> Tensors:
    """Call a construct on tensors of the trace that is running, or of one around it."""
    trace = running_trace()
    assert isinstance(trace, ClosureLifting)
    operands = tuple(map(trace.take, operands))
    if not torch.is_grad_enabled() or not any(map(needs_grad, operands)):
        return list(_Call.apply(construct, None, *operands))
    found = differentiated(construct, apply)
    return list(_Call.apply(found.forward, found, *operands, *found.constants))[: found.count]


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
        ctx.mark_non_differentiable(*(x for x in output if not (x.is_floating_point() or x.is_complex())))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        operands, results = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        return None, None, *_gradients(ctx.construct, ctx.how, operands, results, cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
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
    if how is None or any(cotangent is not None for cotangent in cotangents[how.count :]):
        # Of what the first derivative reads there is a second one: what that reads, is computed anew.
        again = differentiated(construct, apply)
        operands = (*operands, *again.constants)
        results = list(_Call.apply(again.forward, again, *operands))
        return _gradients(again.forward, again, operands, results, cotangents)[: len(operands) - len(again.constants)]
    take = {
        From.OPERAND: lambda number: operands[number],
        From.RESULT: lambda number: results[number],
        From.ZERO: lambda number: torch.zeros_like(operands[number]),
        From.COTANGENT: lambda number: _or_zeros(cotangents[number], results[number]),
    }
    found: list[torch.Tensor | None] = [None] * len(operands)
    for number, gradient in zip(
        how.inputs, apply(how.backward, *(take[kind](n) for kind, n in how.takes)), strict=True
    ):
        found[number] = gradient
    return found


def _or_zeros(cotangent: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if cotangent is None else cotangent
