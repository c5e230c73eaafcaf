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
from torch.utils._python_dispatch import _disable_current_modes

from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.ir.graph import Graph, Value, map_leaves
from spmd.ir.names import Namer
from spmd.tracing.active_transforms import unwrapped
from spmd.tracing.checkpointed import checkpoints, recompute
from spmd.tracing.closures import ClosureLifting
from spmd.tracing.functionalization import Functionalization
from spmd.tracing.loops.constructs import Body
from spmd.tracing.recorder import Recorder
from spmd.tracing.running import running_in, running_trace
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


def close(function: Callable[..., Sequence[torch.Tensor]], *like: torch.Tensor) -> Closed:
    """Trace a function of tensors, in a trace that is running and under its transforms.

    Args:
        function: from tensors to a list of tensors.
        like: tensors of the shapes and dtypes of its arguments, such as transforms show them.

    Raises:
        TraceError: as a trace does; the function writes to an argument, or to a tensor from around it.
    """
    outer = running_trace()
    assert isinstance(outer, ClosureLifting)
    namer = Namer()
    values = [Value(namer.fresh("x"), TensorMeta.of(tensor)) for tensor in like]
    recorder = outer.recorder.inner(namer, dict.fromkeys(values, "of the body"))
    with temporarily_clear_interpreter_stack():  # no transform may wrap the tensors of the body
        fakes = [recorder.fake(value, tensor.device) for value, tensor in zip(values, like, strict=True)]
    lifting = _Capture(recorder, outer)
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
        named = lifting.named

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        trace = running_trace()
        assert isinstance(trace, ClosureLifting)
        with _seeing_functions(trace), trace.substituting(named, tensors[len(like) :]):
            return [trace.take(tensor) for tensor in function(*tensors[: len(like)])]

    functions = tuple(dict.fromkeys(lifting.functions))
    outer.functions += functions
    return Closed(Body(closed.body.graph, call, functions), (*named, *closed.closed_over))


def without_constants(graph: Graph) -> Closed:
    """A program whose constants are inputs."""
    values = tuple(value for value, _ in graph.constants)
    closed = attrs.evolve(graph, inputs=(*graph.inputs, *values), constants=())
    return Closed(Body(closed), tuple(tensor for _, tensor in graph.constants))


class _Capture(ClosureLifting):
    """Makes each tensor from around a body an input of it, transformed ones too.

    Attributes:
        inputs: the values of the tensors in the body, in the order of their first use.
    """

    def __init__(self, recorder: Recorder, outer: ClosureLifting) -> None:
        super().__init__(recorder, outer.coordinate)
        self.unevenness, self.in_backward = outer.unevenness, outer.in_backward
        self._under_transform = False
        around = peek_interpreter_stack()
        self._level = around.level() if around is not None else 0
        # Keyed by id: the tensor that the function names, and the one inside.
        self._inside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.inputs: list[Value] = []
        self._outer = outer

    @property
    def named(self) -> tuple[torch.Tensor, ...]:
        """The captured tensors, as the function names them: in another trace it has others (`substituting`)."""
        return tuple(named for named, _ in self._inside.values())

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
            with temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunction():
                value = Value(self.recorder._namer.fresh("closed_over"), TensorMeta.of(leaf))
                fake = self.recorder.fake(value, leaf.device)
                self.inputs.append(value)
                self._inside[id(leaf)] = (leaf, self.functional(fake))
        return self._inside[id(leaf)][1]

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
    active = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return contextlib.nullcontext() if any(mode is trace for mode in active) else trace


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
