"""Bodies of loops and branches as closed programs: the tensors that a function closes over become inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_get_level, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from spmd.collectives.environment import bound_axes
from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.ir.graph import Graph, Value, map_leaves
from spmd.ir.names import Namer
from spmd.tracing.active_transforms import unwrapped
from spmd.tracing.checkpointed import checkpoints, recompute
from spmd.tracing.closures import Casting, ClosureLifting
from spmd.tracing.functionalization import Functionalization
from spmd.tracing.loops.constructs import Body
from spmd.tracing.loops.per_rank import declare, region_of_body, types_of, varying
from spmd.tracing.manual.axis_types import Types
from spmd.tracing.recorder import Recorder
from spmd.tracing.running import function_modes, running_in, running_trace
from spmd.tracing.source import user_source, where

_FUNCTION_MODES: Any = torch._C


@attrs.frozen(eq=False)
class Closed:
    """A program without constants, and the tensors for its last inputs.

    Args:
        body: the program.
        closed_over: the tensors from around it, which it takes after its other inputs.
    """

    body: Body
    closed_over: tuple[torch.Tensor, ...]


def close(function: Callable[..., Sequence[torch.Tensor]], *like: torch.Tensor, parted: Sequence[str] = ()) -> Closed:
    """Trace a function of tensors, in a trace that is running and under its transforms.

    Args:
        function: from tensors to a list of tensors.
        like: tensors of the shapes and dtypes of its arguments, such as transforms show them.
        parted: the manual axes along which it may run on some ranks only.

    Raises:
        TraceError: as a trace does; the function writes to an argument, or to a tensor from around it.
    """
    outer = running_trace()
    assert isinstance(outer, ClosureLifting)
    namer = Namer()
    values = [Value(namer.fresh("x"), TensorMeta.of(tensor)) for tensor in like]
    recorder = outer.recorder.inner(namer, dict.fromkeys(values, "of the body"))
    declare(values, [varying(types_of(tensor), parted) for tensor in like])
    with temporarily_clear_interpreter_stack():  # no transform may wrap the tensors of the body
        fakes = [recorder.fake(value, tensor.device) for value, tensor in zip(values, like, strict=True)]
    lifting = _Capture(recorder, outer, parted)
    with contextlib.closing(lifting):
        with (
            without_outer_traces(),
            running_in(lifting),
            checkpoints(recorder.regions),
            recorder,
            Functionalization(lifting.lift),
            lifting,
        ):
            with temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunction():
                given = [lifting.functional(fake) for fake in fakes]
            outputs = [lifting.result(tensor) for tensor in function(*given)]
            lifting.check_writes()
        outer.unevenness, outer.in_backward = lifting.unevenness, lifting.in_backward
        results = tuple(recorder.value(tensor) for tensor in outputs)
        graph = Graph(
            (*values, *lifting.inputs), tuple(recorder.constants.items()), tuple(recorder.operations), results
        )
        closed = without_constants(recompute(graph, recorder.regions, namer).verify())
        captured, named, casts = tuple(lifting.captured), tuple(lifting.named), lifting.casts
    in_region, count = region_of_body(), len(like)

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        trace = running_trace()
        assert isinstance(trace, ClosureLifting)
        given = tensors[count:]
        with _seeing_functions(trace), in_region(), trace.substituting(named, given, casts):
            return [trace.take(tensor) for tensor in function(*tensors[:count])]

    functions = tuple(dict.fromkeys(lifting.functions))
    outer.functions += functions
    return Closed(Body(closed.body.graph, call, functions), (*captured, *closed.closed_over))


def without_constants(graph: Graph) -> Closed:
    """A program whose constants are inputs."""
    values = tuple(value for value, _ in graph.constants)
    closed = attrs.evolve(graph, inputs=(*graph.inputs, *values), constants=())
    return Closed(Body(closed), tuple(tensor for _, tensor in graph.constants))


class _Capture(ClosureLifting):
    """Makes each tensor from around a body an input of it, transformed ones too.

    Attributes:
        captured: the tensors, as the function names them: in another trace it has others (`substituting`).
        inputs: their values in the body, in the order of their first use.
        named: the same tensors; for one that is only cast, a tensor that the function does not name.
        casts: the number of a captured tensor, how it is cast, and the number of the input that is so.
    """

    def __init__(self, recorder: Recorder, outer: ClosureLifting, parted: Sequence[str]) -> None:
        super().__init__(recorder, outer.coordinate)
        self._parted, self._axes = parted, bound_axes()
        self.unevenness, self.in_backward = outer.unevenness, outer.in_backward
        self.marks_no_grad = outer.marks_no_grad
        self._under_transform = False
        around = peek_interpreter_stack()
        self._level = around.level() if around is not None else 0
        # Keyed by id: the tensor that the function names, and the one inside.
        self._inside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.inputs: list[Value] = []
        self.captured: list[torch.Tensor] = []
        self.named: list[torch.Tensor] = []
        self.casts: list[tuple[int, Casting, int]] = []
        self._numbers: dict[int, int] = {}  # by the ids of tensors of the body, which `_tracked` keeps
        self._outer = outer
        self._modes_around = _get_current_dispatch_mode_stack()

    def given(self, leaf: Any) -> Any:
        found = super().given(leaf)
        return self._outer.given(leaf) if found is leaf else found

    def close(self) -> None:
        self._inside.clear()
        super().close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_leaves(self.capture, args), map_leaves(self.capture, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def lift(self, leaf: Any) -> Any:
        """As `ClosureLifting.lift`; also for what a transform inside of the body has hidden until here."""
        return self.capture(leaf, hidden=True)

    def take(self, leaf: torch.Tensor) -> torch.Tensor:
        return self.capture(leaf)  # type: ignore[no-any-return]

    def capture(self, leaf: Any, hidden: bool = False) -> Any:
        """The tensor of the body for one from around it; any other value unchanged."""
        if not isinstance(leaf, torch.Tensor) or self._is_own(leaf):
            return leaf
        if id(leaf) not in self._inside:
            outside = self._outer.given(leaf)
            level = maybe_get_level(outside)
            is_traced = isinstance(outside, FunctionalTensor) or is_functorch_wrapped_tensor(outside)
            if (hidden and is_traced) or (level is not None and level > self._level):
                raise TraceError(
                    f"The body of a loop or a branch transforms a tensor {TensorMeta.of(leaf)} from around it, at "
                    f"{where(user_source())}. Pass it to the body: in the carry, in xs, or as an operand; or call the "
                    "transform on a function of it, x * 1."
                )
            self._inside[id(leaf)] = (leaf, self._input(leaf, self._types_around(leaf)))
        return self._inside[id(leaf)][1]

    def _types_around(self, leaf: torch.Tensor) -> Types:
        """Its types along the axes that are manual for it or around the body, not in a region inside of the body."""
        with running_in(self._outer), _disable_current_modes(), contextlib.ExitStack() as stack:
            for mode in self._modes_around:  # which makes it a tensor of the trace around, not of the body
                stack.enter_context(mode)
            return varying(types_of(leaf, self._axes), self._parted)

    def _input(self, leaf: torch.Tensor, types: Types, is_cast: bool = False) -> torch.Tensor:
        """A new input of the body, for a tensor that its function names, or for a cast of it."""
        value = Value(self.recorder._namer.fresh("closed_over"), TensorMeta.of(leaf))
        declare([value], [types])
        with temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunction():
            inside = self.functional(self.recorder.fake(value, leaf.device))
        self.inputs.append(value)
        self.captured.append(leaf)
        self.named.append(inside if is_cast else leaf)
        self._numbers[id(inside)] = len(self.named) - 1
        return inside

    def cast(self, leaf: torch.Tensor, casts: Casting) -> torch.Tensor | None:
        """A tensor from around the body, cast there: its gradient is summed once, behind the loop."""
        number = self._numbers.get(id(leaf))
        if number is None:
            return super().cast(leaf, casts)
        self.casts.append((number, casts, len(self.inputs)))
        outside = self.captured[number]
        return self._input(outside, {**self._types_around(outside), **dict(casts)}, is_cast=True)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the body's."""
        tensor = unwrapped(tensor)
        if isinstance(tensor, FunctionalTensor):
            tensor = tensor.elem
        if torch._is_functional_tensor(tensor):
            tensor = unwrapped(torch._from_functional_tensor(tensor))  # transforms around wrap it again
        return getattr(tensor, "fake_mode", None) is self.recorder

    def result(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that the recorder knows for a result of the body."""
        finished = self.finish(unwrapped(self.capture(tensor)))
        if finished.shape != tensor.shape:
            raise TraceError(
                f"The body of a loop or a branch draws random numbers for each item of a vmap around it, at "
                f"{where(user_source())}. Draw them outside, and pass them as xs."
            )
        return finished


def _seeing_functions(trace: ClosureLifting) -> contextlib.AbstractContextManager[object]:
    """A context in which a trace sees the functions that are called: also in a rule for vmap, which it calls itself."""
    return contextlib.nullcontext() if any(mode is trace for mode in function_modes()) else trace


@contextlib.contextmanager
def without_outer_traces() -> Iterator[None]:
    """A context in which the traces that are running see no operators and no functions."""
    popped = []
    while torch._C._len_torch_function_stack():
        popped.append(_FUNCTION_MODES._pop_torch_function_stack())
    kept = [mode for mode in reversed(popped) if not isinstance(mode, ClosureLifting)]
    for mode in kept:
        _FUNCTION_MODES._push_on_torch_function_stack(mode)
    try:
        with _disable_current_modes():
            yield
    finally:
        for _ in kept:
            _FUNCTION_MODES._pop_torch_function_stack()
        for mode in reversed(popped):
            _FUNCTION_MODES._push_on_torch_function_stack(mode)
