"""Programs as functions of tensors, for transforms of the bodies of loops and branches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch

from spmd.errors import TraceError
from spmd.ir.graph import Graph, Value, iterate_leaves, map_leaves
from spmd.ir.number import Number
from spmd.ir.recompute import RECOMPUTE
from spmd.tracing.active_transforms import active_transforms, unwrapped
from spmd.tracing.closures import ClosureLifting
from spmd.tracing.constrain import differentiable
from spmd.tracing.loops.closed import Closed, without_constants, without_outer_traces
from spmd.tracing.loops.constructs import Body, Recorded, steps
from spmd.tracing.loops.per_rank import declare, known_types
from spmd.tracing.numbers import traced
from spmd.tracing.running import running_trace
from spmd.tracing.source import at_line, user_source, where
from spmd.tracing.trace import trace_flat

Apply = Callable[..., Sequence[torch.Tensor]]


def run(body: Body, tensors: Sequence[torch.Tensor], apply: Apply) -> list[torch.Tensor]:
    """Call the function of a body, or else the operators of its program."""
    if body.call is None:
        return replay(body.graph, tensors, apply)
    with _saying_what_has_no_derivative():
        return list(body.call(*tensors))


@contextlib.contextmanager
def _saying_what_has_no_derivative() -> Iterator[None]:
    """A context in which torch's errors for operators that lack a formula are errors of the trace."""
    try:
        yield
    except RuntimeError as error:  # NotImplementedError is one
        if not any(text in str(error) for text in ("forward AD", "automatic differentiation")):
            raise
        raise TraceError(
            f"A loop or a branch at {where(user_source())} is differentiated, and an operator in its body has no such "
            f"derivative in torch: {str(error).splitlines()[0]} Write it of others, or pass it x.detach()."
        ) from error


def replay(graph: Graph, tensors: Sequence[torch.Tensor], apply: Apply) -> list[torch.Tensor]:
    """Call the operators of a program without constants.

    Args:
        graph: the program.
        tensors: its inputs.
        apply: calls a construct in it with its operands.
    """
    known: dict[Value, Any] = dict(zip(graph.inputs, tensors, strict=True))
    take = lambda leaf: known[leaf] if isinstance(leaf, Value) else traced(leaf) if isinstance(leaf, Number) else leaf  # noqa: E731
    for step in steps(graph):
        if isinstance(step, Recorded):
            with at_line(step.source):
                made = apply(step.construct, *map(take, step.operands))
            known.update(zip(step.results, made, strict=True))
            continue
        with at_line(step.source), _saying_what_has_no_derivative():
            call = _FORMS.get(step.op) or differentiable(step.op)
            found = call(*map_leaves(take, step.args), **map_leaves(take, dict(step.kwargs)))
        pairs = zip(step.results, iterate_leaves(found), strict=True)
        known.update((value, tensor) for value, tensor in pairs if value is not None)
    return [known[value] for value in graph.outputs]


class _NoGrad(torch.autograd.Function):
    """The operator that marks what was computed under `torch.no_grad`: it has a tangent, and no gradient."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.detach_copy(x)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:  # type: ignore[override]
        return None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _NoGrad.apply(tangent)  # type: ignore[no-any-return]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return _NoGrad.apply(x), in_dims[0]


def _copied(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`aten.copy`, which has no derivative in torch; the result has the strides of `x`."""
    return torch.where(torch.zeros_like(x, dtype=torch.bool), x.detach(), source.to(x.dtype))


def _slice_scattered(
    x: torch.Tensor, source: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor:
    """`aten.slice_scatter`, of which torch's rule for vmap takes places as they are: negative, or beyond the end."""
    start, end, _ = slice(start, end).indices(x.shape[dim])
    return torch.slice_scatter(x, source, dim, start, end, step)


_FORMS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.aten.detach_copy.default: _NoGrad.apply,
        torch.ops.aten.copy.default: _copied,
        RECOMPUTE: lambda x, number: x,  # the derivative of a derivative keeps what that computes again
        torch.ops.aten.view.default: torch.reshape,  # a transform may have given its operand other strides
        torch.ops.aten.slice_scatter.default: _slice_scattered,
    }
)
"""Operators, and functions with derivatives that compute what they do."""


def transformed(results: Sequence[torch.Tensor]) -> list[int]:
    """The numbers of the results of a body on which the transform that is running acts: they depend on its inputs."""
    return [number for number, x in enumerate(results) if active_transforms([x])]


def body_of(
    function: Callable[..., Sequence[torch.Tensor]],
    like: Sequence[Value],
    results: Sequence[Value],
    functions: tuple[str, ...],
) -> Closed:
    """A function of tensors that closes over none, and calls the function of a body, as a body."""
    closed = without_constants(retrace(function, like, results))
    call = lambda *tensors: function(*tensors[: len(like)])  # noqa: E731
    return attrs.evolve(closed, body=attrs.evolve(closed.body, call=call, functions=functions))


def retrace(function: Callable[..., Sequence[torch.Tensor]], like: Sequence[Value], results: Sequence[Value]) -> Graph:
    """Trace a function of tensors that closes over none.

    Args:
        function: from tensors to a list of tensors.
        like: values with the shapes, dtypes, and types along manual axes of its arguments.
        results: values with the types of its results, where these are constants, such as zeros.
    """
    types, outer = known_types(), running_trace()

    def typed(*tensors: torch.Tensor) -> list[torch.Tensor]:
        trace = running_trace()
        assert isinstance(trace, ClosureLifting)
        trace.in_backward, trace.recorder.observer = outer.in_backward, types
        trace.marks_no_grad = True
        declare([trace.value(x) for x in tensors], [types.of(value) if types is not None else {} for value in like])
        try:
            return [trace.finish(unwrapped(x)) for x in function(*tensors)]
        finally:
            trace.recorder.observer = None  # results are per rank, as those of a body are

    with without_outer_traces():
        graph = trace_flat(typed, [value.meta for value in like])
    for made, value in zip(graph.outputs, results, strict=True):
        if types is not None and types.is_constant(made):
            types.declare(made, types.of(value))
    return graph
