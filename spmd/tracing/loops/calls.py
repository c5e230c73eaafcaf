"""Calls of loops, branches and layers in a trace, with the rules by which transforms act on them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import TransformType, peek_interpreter_stack

from spmd.core.value_types import is_continuous
from spmd.errors import TraceError
from spmd.ir.effects import Effect
from spmd.tracing.active_transforms import active_transforms
from spmd.tracing.autograd_functions import needs_grad
from spmd.tracing.checkpointed import is_checkpointed
from spmd.tracing.closures import ClosureLifting
from spmd.tracing.loops.batching import batched
from spmd.tracing.loops.closed import Closed, close
from spmd.tracing.loops.constructs import Body, Branch, Construct, Loop, Subprogram, While, with_equal_inputs
from spmd.tracing.loops.derivatives import Differentiated, From, differentiated
from spmd.tracing.loops.forward_mode import Dual
from spmd.tracing.loops.per_rank import (
    as_expected,
    axes_of_casts,
    check_parted,
    joined,
    parted_axes,
    raised,
    result_types,
    types_of,
    varying,
)
from spmd.tracing.manual.axis_types import Types
from spmd.tracing.running import running_trace
from spmd.tracing.source import where

Tensors = list[torch.Tensor]
Gradients = list["torch.Tensor | None"]


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

    items = [x.select(0, 0) if length else x.new_empty(x.shape[1:]) for x in xs]
    closed, init = _trip(flat, init, items)
    loop = Loop(closed.body, count, len(xs), length, reverse)
    if not length:
        device = next((x.device for x in (*init, *xs)), None)
        stacked = loop.results[count:]
        return list(init), [torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in stacked]
    results = apply(loop, *init, *xs, *closed.closed_over)
    return _changed(loop.body, init, results), results[count:]


def traced_while(
    condition: Callable[[Tensors], torch.Tensor], body: Callable[[Tensors], Tensors], init: Sequence[torch.Tensor]
) -> Tensors:
    """A loop whose length is data.

    Args:
        condition: from carries to a 0-d boolean tensor.
        body: from carries to the next ones, of equal shapes and dtypes.
        init: the first carries.
    """
    before: tuple[str, ...] | None = None
    parted: tuple[str, ...] = ()
    while parted != before:
        closed, init = _trip(lambda *carries: body(list(carries)), init, parted=parted)
        tested = close(lambda *carries: [condition(list(carries))], *init, parted=parted)
        before, parted = parted, parted_axes("while_loop", result_types(tested.body.outputs)[0])
    for closing in (tested, closed):
        check_parted("while_loop", parted, closing.body.graph.operations)
    programs = with_equal_inputs(len(init), tested.body, closed.body)
    loop = While(*programs, len(init))
    return _changed(loop.body, init, apply(loop, *init, *tested.closed_over, *closed.closed_over))


def traced_cond(
    predicate: bool | torch.Tensor,
    on_true: Callable[[], Tensors],
    on_false: Callable[[], Tensors],
    probability: float | None = None,
) -> Tensors:
    """The results of one of two functions.

    Args:
        predicate: a 0-d boolean tensor; or what is known to Python.
        on_true, on_false: the functions; their results have equal shapes and dtypes.
        probability: how likely the predicate is true, if that is known.
    """
    functions = on_true, on_false
    parted = () if isinstance(predicate, bool) else parted_axes("cond", types_of(predicate))
    sides = [close(function, parted=parted) for function in functions]  # both, so that both are checked
    inside = parted
    while parted and (cast := axes_of_casts([side.body.graph for side in sides]).difference(inside)):
        inside = (*inside, *sorted(cast))
        sides = [close(function, parted=inside) for function in functions]
    if isinstance(predicate, bool):
        return on_true() if predicate else on_false()
    given = [result_types(side.body.outputs) for side in sides]
    wanted = [varying(joined(x, y), parted) for x, y in zip(*given, strict=True)]
    if any(types != wanted for types in given):
        sides = [close(_raising(function, wanted), parted=inside) for function in functions]
    for side in sides:
        check_parted("cond", parted, side.body.graph.operations)
    programs = with_equal_inputs(0, sides[0].body, sides[1].body)
    results = apply(Branch(programs, probability), predicate, *sides[0].closed_over, *sides[1].closed_over)
    returned = [_returned(side) for side in sides]
    return [x if x is y and x is not None else new for new, x, y in zip(results, *returned, strict=True)]


def _changed(body: Body, init: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Tensors:
    """The last carries; what a body returns as it gets it is what the loop begins with, and no batch under vmap."""
    given = zip(init, results, body.inputs, body.outputs, strict=False)
    return [first if new is old else last for first, last, old, new in given]


def _returned(side: Closed) -> list[torch.Tensor | None]:
    """What a side closes over and returns as it is; None for other results."""
    given = dict(zip(side.body.inputs, side.closed_over, strict=True))
    return [given.get(value) for value in side.body.outputs]


def _trip(
    function: Callable[..., Tensors],
    init: Sequence[torch.Tensor],
    items: Sequence[torch.Tensor] = (),
    parted: Sequence[str] = (),
) -> tuple[Closed, list[torch.Tensor]]:
    """The program of a trip, and what its first carries are, cast to the types that carries have in all trips."""
    init = list(init)
    while True:
        wanted = [varying(types_of(x), parted) for x in init]
        closed = close(_raising(function, wanted), *init, *items, parted=parted)
        made = result_types(closed.body.outputs)
        found = [joined(types, new) for types, new in zip(wanted, made, strict=False)]
        if found == wanted:
            return closed, init
        init = [raised(x, types) for x, types in zip(init, found, strict=True)]


def _raising(function: Callable[..., Tensors], wanted: Sequence[Types]) -> Callable[..., Tensors]:
    """A function whose first results are cast to types that are wanted, where they can be."""

    def call(*tensors: torch.Tensor) -> Tensors:
        results = list(function(*tensors))
        return [raised(x, types) for x, types in zip(results, wanted, strict=False)] + results[len(wanted) :]

    return call


def apply(construct: Construct, *operands: torch.Tensor) -> Tensors:
    """Call a construct on tensors of the trace that is running, or of one around it."""
    operands = tuple(map(running_trace().take, operands))
    is_recorded = torch.is_grad_enabled() and _is_below_grad() and any(map(needs_grad, operands))
    continuous = any(is_continuous(meta.dtype) for meta in construct.results)
    if isinstance(construct, While) or not is_recorded or not continuous:
        return _call(construct, operands)
    found = _differentiated(construct, operands)
    if is_checkpointed() and construct.may_run_again and not isinstance(construct, Subprogram):
        return _call(construct, operands, how=found)
    results = _call(found.forward, (*operands, *found.constants), how=found)[: found.count]
    return [x.clone() for x in results]  # to which the function may write, where the derivative reads what it was


def _call(
    construct: Construct,
    operands: Sequence[torch.Tensor],
    *,
    how: Differentiated | None = None,
    of: Differentiated | None = None,
) -> Tensors:
    """The results of a construct, of operands with the types that its bodies expect.

    Args:
        construct: the construct.
        operands: its operands.
        how: with its derivative, if that is known: what it is the `forward` of, or the original of.
        of: what it is the `backward` of; None if it is no derivative.
    """
    given = [as_expected(x, value) for x, value in zip(operands, construct.inputs, strict=True)]
    return list(_Call.apply(construct, how, of, *given))


def _is_below_grad() -> bool:
    """Whether the innermost transform that acts is one of gradients, or none does: others have rules of their own."""
    innermost = peek_interpreter_stack()
    return innermost is None or innermost.key() == TransformType.Grad


class _Call(torch.autograd.Function):
    """A call of a construct.

    Attributes:
        casts_operands: says that its operands have the types along manual axes that it takes (`as_expected`).
    """

    casts_operands = True

    @staticmethod
    def forward(construct: Construct, how: Any, of: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        trace = running_trace()
        assert isinstance(trace, ClosureLifting)
        recorder, device = trace.recorder, operands[0].device if operands else torch.device("cpu")
        given = [recorder.value(trace.finish(trace.take(operand))) for operand in operands]
        record = recorder.add_noted if isinstance(construct, Subprogram) else recorder.add
        return tuple(trace.made(value, device) for value in construct.record(record, given, recorder.line()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.construct, ctx.how, ctx.of, *operands = inputs
        ctx.count = len(operands)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *output)
        ctx.save_for_forward(*operands)
        continuous = {number for number, x in enumerate(output) if is_continuous(x.dtype)}
        if ctx.how is not None:
            continuous -= set(range(ctx.how.count)).difference(ctx.how.dependent)
        with torch.autograd.forward_ad._set_fwd_grad_enabled(True):  # torch has disabled it, and shows no tangents
            moves = [active_transforms([x])[:1] == [TransformType.Jvp] for x in operands]
        ctx.dual = Dual.of(ctx.construct, moves, apply) if continuous and any(moves) else None
        if ctx.dual is not None:
            _check_draws(ctx.construct, "forward mode")
            continuous &= ctx.dual.dependent
        ctx.mark_non_differentiable(*(x for number, x in enumerate(output) if number not in continuous))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        operands, results = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        has_kept = ctx.how is not None and ctx.construct is ctx.how.forward
        count = ctx.how.count if has_kept else 0
        found: Gradients = [None] * len(operands)
        if any(cotangent is not None for cotangent in cotangents[:count]):
            found = _gradients(ctx.how, operands, results, cotangents[:count])
        if any(cotangent is not None for cotangent in cotangents[count:]):
            # Of a derivative, of what one reads, or of what is checkpointed: what it reads, it computes again.
            how = ctx.how.again if has_kept else ctx.how
            again = how if how is not None else _differentiated(ctx.construct, operands, ctx.of)
            _check_draws(again.forward, "its second derivative")
            given = (*operands, *again.constants)
            made = _call(again.forward, given, how=again)
            added = _gradients(again, given, made, [*[None] * count, *cotangents[count:]])
            found = [_sum(x, y) for x, y in zip(found, added, strict=False)]
        return None, None, None, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        primals = [torch._VF._unpack_dual(x, level=0)[0] for x in ctx.saved_tensors]  # type: ignore[attr-defined]
        return ctx.dual.tangents(primals, tangents[3:], apply) if ctx.dual else (None,) * len(ctx.construct.results)

    @staticmethod
    def vmap(info: Any, in_dims: Any, construct: Construct, how: Any, of: Any, *operands: torch.Tensor) -> Any:
        return batched(construct, info, in_dims[3:], operands, apply)


def _differentiated(
    construct: Construct, operands: Sequence[torch.Tensor], of: Differentiated | None = None
) -> Differentiated:
    """A construct for reverse mode, with respect to the operands that need gradients."""
    needed = list(map(needs_grad, operands))
    return differentiated(construct, apply, needed if of is None else list(map(operator.and_, needed, of.varied)))


def _gradients(
    how: Differentiated,
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
) -> Gradients:
    """The cotangents of operands, for those of the results that the original construct has."""
    take = {
        From.OPERAND: lambda number: operands[number],
        From.RESULT: lambda number: results[number],
        From.ZERO: lambda number: torch.zeros_like(operands[number]),
        From.COTANGENT: lambda number: _or_zeros(cotangents[number], results[number]),
    }
    gradients = _call(how.backward, [take[kind](number) for kind, number in how.takes], of=how)
    by_operand = dict(zip(how.inputs, gradients, strict=True))
    return [by_operand.get(number) for number in range(len(operands))]


def _check_draws(construct: Construct, transform: str) -> None:
    """TraceError if a construct draws from torch's generator, and runs again for a transform: it would draw others."""
    bodies = construct.sides if isinstance(construct, Branch) else (construct.body,)
    draws = next((o for body in bodies for o in body.graph.operations if o.effect is Effect.RANDOM), None)
    if draws is not None:
        raise TraceError(
            f"The body of a loop or a branch draws random numbers, {draws.name} at {where(draws.source)}, and "
            f"{transform} runs it again, with other numbers. Draw them outside, and pass them as xs or operands; or "
            'draw by keys: spmd.jit(..., rng="counter"), or spmd.random.'
        )


def _sum(x: torch.Tensor | None, y: torch.Tensor | None) -> torch.Tensor | None:
    return x if y is None else y if x is None else x + y


def _or_zeros(cotangent: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if cotangent is None else cotangent
