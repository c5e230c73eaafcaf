"""Traces a function into a flat functional graph of aten operators over global tensors.

The function runs once, on fake tensors. Functionalization makes in-place operators on its own tensors functional. A
dispatch mode below it records each operator; `torch.func` transforms inside the function have been applied by then.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import attrs
import optree
import torch
from torch._C._functorch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from spmd.core.containers import CONSTANTS
from spmd.core.mesh import Coordinate
from spmd.core.pytree import leaf_remedy, tree_flatten, tree_leaves
from spmd.core.spec import TensorMeta, has_meta
from spmd.errors import TraceError
from spmd.ir.graph import Graph, Operation, Value, iterate_leaves
from spmd.ir.names import Namer
from spmd.ir.number import Number
from spmd.ir.variants import Unevenness, Variants
from spmd.tracing.assignments import fill_masked
from spmd.tracing.checkpointed import checkpoints, recompute
from spmd.tracing.differentiable import DIFFERENTIABLE
from spmd.tracing.effects import Generators, refuse_changes, refuse_rebinding
from spmd.tracing.functionalization import Functionalization
from spmd.tracing.nested_tracers import inlined, nested_tracers
from spmd.tracing.numbers import DIFFERENTIABLE_IN_TENSORS, Guards, has_number, number_of, tensor_of_numbers, traced
from spmd.tracing.recorder import Recorder, where
from spmd.tracing.source import SourceTracker, user_source
from spmd.tracing.torch_state import restored
from spmd.tracing.traced_tensor import describe, is_traced, refuse_reading, retyped

_tracing: ContextVar[RunningTrace | None] = ContextVar("spmd_tracing", default=None)


class Records(Protocol):
    """The operations that a trace has recorded, and what is called with each of them and with each result."""

    operations: list[Operation]
    observe: Callable[[Operation], None]
    check_result: Callable[[Value], None]


class RunningTrace(Protocol):
    """What manual regions ask of the trace in which they run; `spmd.api.uncompiled` has one of real tensors.

    Attributes:
        coordinate: that of the rank with whose shards manual regions run; None for zero.
        unevenness: how the shapes of shards in manual regions differ between ranks; None if they do not.
        in_backward: makes the context in which Python code of backward passes runs.
        gather: returns a Python value of every rank, in rank order, where each rank runs by itself; None in a trace,
            which is for all ranks.
        in_backward: makes the context in which Python code of backward passes runs.
    """

    unevenness: Unevenness | None
    in_backward: Callable[[], contextlib.AbstractContextManager[None]]

    @property
    def gather(self) -> Callable[[Any], list[Any]] | None: ...

    @property
    def coordinate(self) -> Coordinate | None: ...

    @property
    def recorder(self) -> Records: ...

    def value(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor as it is now."""

    def lift(self, leaf: Any) -> Any:
        """The tensor of the trace for one from outside; any other value unchanged."""


def is_tracing() -> bool:
    """Whether a function is being traced; a jitted function that is called meanwhile is inlined into the trace."""
    return _tracing.get() is not None


def running_trace() -> RunningTrace:
    """What knows the values of the tensors of the trace that is running."""
    found = _tracing.get()
    assert found is not None, "no function is being traced"
    return found


@contextlib.contextmanager
def tracing_with(trace: RunningTrace) -> Iterator[None]:
    """A context in which a trace is running."""
    token = _tracing.set(trace)
    try:
        yield
    finally:
        _tracing.reset(token)


@attrs.frozen(eq=False)
class Traced:
    """A traced function.

    Args:
        graph: the program over flat inputs and outputs.
        in_tree: optree's treespec of the tuple of dynamic arguments.
        out_tree: optree's treespec of the result.
        input_paths: the path of each input in the arguments, for messages: `0['w']`.
        output_paths: the path of each output in the result, for messages: `[1]['loss']`; empty for a bare tensor.
        name: the function's name.
        guards: what the program takes for granted of the dynamic numbers of a call; planning may add to them.
        values: for each leaf of the result that is no tensor, its position and the number or constant that it is.
    """

    graph: Graph
    in_tree: optree.PyTreeSpec
    out_tree: optree.PyTreeSpec
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    name: str
    guards: Guards = attrs.field(factory=Guards)
    values: tuple[tuple[int, Any], ...] = ()

    @classmethod
    def flat(cls, graph: Graph, name: str) -> Traced:
        """A program from tensors to tensors as the trace of a function."""
        inputs, outputs = (tree_flatten(tuple(values))[1] for values in (graph.inputs, graph.outputs))
        sources, results = (tuple(map(str, range(tree.num_leaves))) for tree in (inputs, outputs))
        return cls(graph, inputs, outputs, sources, results, name)

    def result(self, tensors: Iterable[Any], numbers: Sequence[float] = ()) -> Any:
        """The result of the function, from its tensors and the dynamic numbers of the call."""
        if not self.values:
            return self.out_tree.unflatten(tensors)
        leaves = list(tensors)
        for position, value in self.values:
            leaves.insert(position, value.evaluate(numbers) if isinstance(value, Number) else value)
        return self.out_tree.unflatten(leaves)

    def __str__(self) -> str:
        return f"{self.name}\n{self.graph}"


def trace(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    static_argnums: Sequence[int] = (),
    labels: Sequence[str] = (),
    name: str | None = None,
) -> Traced:
    """Trace a function of pytrees of tensors.

    Args:
        function: a pure function; `torch.func` transforms may be used inside.
        args: its positional arguments. Leaves are tensors on any device, or anything with `shape` and `dtype`
            (TensorMeta), whose values are not read; floats, which are dynamic numbers; or other constants, which are
            passed unchanged. None is an empty subtree.
        static_argnums: positions of the arguments that are passed to the function unchanged, as in `jax.jit`.
        labels: what paths call each argument; by default its position.
        name: the name of the program; by default the function's name.

    Raises:
        TraceError: a leaf or a result that is no tensor and no constant, an in-place write to an argument or to a
            closed-over tensor, random numbers from a torch.Generator other than the default one, lasting changes of
            torch's state, or control flow on the value of a tensor.

    >>> traced = trace(lambda x: {"y": x.sin()}, (TensorMeta((2, 3), torch.float32),))
    >>> traced.output_paths, [str(operation.op) for operation in traced.graph.operations]
    (("['y']",), ['aten.sin.default'])
    """
    static = {number % len(args) for number in static_argnums} if args else set()
    dynamic = [number for number in range(len(args)) if number not in static]
    leaves, in_tree = tree_flatten(tuple(args[number] for number in dynamic))
    accessors = in_tree.accessors()
    paths = dynamic_paths(in_tree, [labels[number] for number in dynamic] if labels else dynamic)
    for leaf, path in zip(leaves, paths, strict=True):
        _check_leaf(leaf, path)
    tensors_at = [position for position, leaf in enumerate(leaves) if has_meta(leaf)]
    parameters = _parameter_names(function, len(args))
    hints = [f"{parameters[dynamic[accessor[0].entry]]}{accessor[1:].codify('')}" for accessor in accessors]
    result: dict[str, Any] = {}
    guards, namer = Guards(), Namer()
    floats = [position for position, leaf in enumerate(leaves) if isinstance(leaf, float)]
    numbers = {
        position: Number(namer.parameter(hints[position]), index, leaves[position], guards.add)
        for index, position in enumerate(floats)
    }

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = [traced(numbers.get(position, leaf)) for position, leaf in enumerate(leaves)]
        for position, tensor in zip(tensors_at, tensors, strict=True):
            given[position] = tensor
        values = iter(in_tree.unflatten(given))
        output = function(*(args[number] if number in static else next(values) for number in range(len(args))))
        outputs, result["tree"] = tree_flatten(output)
        result["paths"] = tuple(accessor.codify("") for accessor in result["tree"].accessors())
        for leaf, path in zip(outputs, result["paths"], strict=True):
            _check_result(leaf, path)
        found = [not isinstance(leaf, torch.Tensor) for leaf in outputs]
        result["values"] = tuple((n, number_of(leaf)) for n, leaf in enumerate(outputs) if found[n])
        result["paths"] = tuple(path for path, is_value in zip(result["paths"], found, strict=True) if not is_value)
        return [leaf for leaf, is_value in zip(outputs, found, strict=True) if not is_value]

    of_tensors = lambda every: [every[position] for position in tensors_at]  # noqa: E731
    reserved = [number.name for number in numbers.values()]
    graph = trace_flat(flat, of_tensors(leaves), names=of_tensors(hints), paths=of_tensors(paths), reserved=reserved)
    paths, name = of_tensors(paths), name or name_of(function)
    return Traced(graph, in_tree, result["tree"], tuple(paths), result["paths"], name, guards, result["values"])


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in programs and messages."""
    return str(getattr(function, "__name__", type(function).__name__))


def dynamic_paths(tree: optree.PyTreeSpec, labels: Sequence[object]) -> list[str]:
    """The path of each leaf of the dynamic arguments, which have these positions or names."""
    return [f"{labels[accessor[0].entry]}{accessor[1:].codify('')}" for accessor in tree.accessors()]


def trace_flat(
    function: Callable[..., Sequence[torch.Tensor]],
    leaves: Sequence[Any],
    *,
    names: Sequence[str] | None = None,
    paths: Sequence[str] | None = None,
    reserved: Sequence[str] = (),
) -> Graph:
    """Trace a function from tensors to a sequence of tensors.

    Args:
        function: takes one tensor for each leaf and returns a list or tuple of tensors.
        leaves: anything with `shape` and `dtype`. The fake tensors have the device of the leaf if it has one, else the
            CPU: torch chooses operators by device. They have its `strides` if it has any, else they are contiguous.
        names: hints for the names of the inputs.
        paths: the paths of the leaves, for messages.
        reserved: names that no value has.

    Raises:
        TraceError: as in `trace`.
    """
    trace = functools.partial(_trace_once, function, leaves, names, paths, reserved)
    graph, lifting = trace(None)
    unevenness = lifting.unevenness
    if unevenness is None:
        return graph
    others = list(unevenness.coordinates())[1:]
    graphs = {unevenness.key(coordinate): (coordinate, trace(coordinate)[0]) for coordinate in others}
    return attrs.evolve(graph, variants=Variants(unevenness, graphs))


def _trace_once(
    function: Callable[..., Sequence[torch.Tensor]],
    leaves: Sequence[Any],
    names: Sequence[str] | None,
    paths: Sequence[str] | None,
    reserved: Sequence[str],
    coordinate: Coordinate | None,
) -> tuple[Graph, ClosureLifting]:
    """As `trace_flat`, with the local shapes of one rank in manual regions: that at a coordinate, by default zero."""
    namer = Namer(reserved)
    hints = names or [f"arg{index}" for index in range(len(leaves))]
    inputs = tuple(
        Value(namer.fresh(hint), TensorMeta(leaf.shape, leaf.dtype)) for hint, leaf in zip(hints, leaves, strict=True)
    )
    labels = dict(zip(inputs, paths or hints, strict=True))
    random = Generators()
    recorder = Recorder(namer, SourceTracker(_trace_once.__code__).current, labels, random.draw)
    with temporarily_clear_interpreter_stack():
        fakes = [recorder.fake(value, _device(leaf), _memory(leaf)) for value, leaf in zip(inputs, leaves, strict=True)]

    lifting = ClosureLifting(recorder, coordinate)
    with (
        tracing_with(lifting),
        _no_modes_around(),
        checkpoints(recorder.regions),
        _errors_raised_only(),
        recorder,
        Functionalization(lifting.lift),
        lifting,
        restored() as before,
    ):
        random.start()
        outputs = function(*[lifting.functional(fake) for fake in fakes])
        again = lambda: function(*[lifting.functional(fake) for fake in fakes])  # noqa: E731
        refuse_changes(before, random, again)
        outputs = [lifting.finish(tensor) for tensor in outputs]
        lifting.check_writes()
    results = tuple(recorder.value(tensor) for tensor in outputs)
    for value in results:
        recorder.check_result(value)
    graph = Graph(inputs, tuple(recorder.constants.items()), tuple(recorder.operations), results)
    return recompute(graph, recorder.regions, namer).verify(), lifting


@contextlib.contextmanager
def _no_modes_around() -> Iterator[None]:
    """A context in which transforms, dispatch modes, inference mode and grad mode from outside do not affect the trace.

    It also switches oneDNN off, so that torch decomposes recurrent layers: oneDNN's single operator for them saves what
    its backward needs only if grad mode is on.
    """
    onednn = torch._C._get_mkldnn_enabled()
    with (
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        nested_tracers(),
    ):
        torch._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(onednn)


@contextlib.contextmanager
def _errors_raised_only() -> Iterator[None]:
    """A context in which torch does not log shape errors of fake tensors: the error is raised anyway."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    silence: Callable[[logging.LogRecord], bool] = lambda record: False  # noqa: E731
    log.addFilter(silence)
    try:
        yield
    finally:
        log.removeFilter(silence)


class ClosureLifting(TorchFunctionMode):
    """Wraps each closed-over tensor for functionalization, and raises for calls that a program cannot represent.

    Functionalization tracks only tensors that it has wrapped; without this, `mask = closed_over > 0; mask[0] = True`
    would reach the recorder as an in-place write.

    Args:
        recorder: records the operators.
        coordinate: that of the rank with whose shards manual regions are traced; None for zero.

    Attributes:
        unevenness: how the shapes of shards in manual regions differ between ranks; None if they do not.
        in_backward: makes the context in which Python code of backward passes runs.
    """

    def __init__(self, recorder: Recorder, coordinate: Coordinate | None) -> None:
        super().__init__()
        self.recorder: Recorder = recorder
        self.coordinate: Coordinate | None = coordinate
        self.unevenness: Unevenness | None = None
        self.gather = None
        self._under_transform = peek_interpreter_stack() is not None
        # Keyed by id: each entry keeps its closed-over tensor alive, so that Python does not reuse the id.
        self._lifted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tracked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._constructs = False
        self.in_backward: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def functional(self, fake: torch.Tensor) -> torch.Tensor:
        """Wrap a fake tensor for functionalization; `check_writes` raises for writes to it, unless it is made here."""
        wrapped = retyped(FunctionalTensor.to_functional(fake))
        if not self._constructs:
            self._tracked.append((fake, wrapped))
        return wrapped

    def value(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor of the trace as it is now, under transforms too."""
        while is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        return self.recorder.value(self.finish(tensor))

    def finish(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that functionalization has wrapped, after all pending writes to it."""
        if not isinstance(tensor, FunctionalTensor):
            return tensor
        with temporarily_clear_interpreter_stack():  # views are made again, which no transform may wrap
            torch._sync(tensor)
        return torch._from_functional_tensor(tensor.elem)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return inlined(func)(*args, **(kwargs or {}))
        refuse_rebinding(func, args, _is_outside)
        if self._under_transform:
            for leaf in iterate_leaves((args, kwargs or {})):
                _refuse_transformed(leaf)
        if func is torch.Tensor.__deepcopy__:
            return args[0].clone()
        if func is torch.Tensor.requires_grad_ and args[1:] in ((), (True,)) and not kwargs and args[0].requires_grad:
            return args[0]  # torch raises under torch.func, also where nothing would change
        if func is torch.Tensor.__repr__ and is_traced(args[0]):
            return describe(args[0])
        if func is torch.Tensor.__format__ and is_traced(args[0]) and not args[1]:
            return describe(args[0])
        refuse_reading(func, args)
        if func in (torch.Tensor.backward, torch.autograd.backward):
            self._check_backward(args[0])
        if func in (torch.tensor, torch.as_tensor) and has_number(args):
            return tensor_of_numbers(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and _is_list_of_tensors(args):
            raise TraceError(
                f"torch.{func.__name__} of a list of tensors at {where(user_source())} needs their values, and a "
                "traced function has none. Use torch.stack or torch.cat."
            )
        if func in _SPLITTERS and any(isinstance(leaf, torch.Tensor) for leaf in (*args[1:], *(kwargs or {}).values())):
            raise TraceError(
                f"{func.__name__} at {where(user_source())} splits where a tensor says, and a program has static "
                "shapes. Pass the places as a tuple of integers."
            )
        if func in DIFFERENTIABLE_IN_TENSORS and has_number(args):
            return DIFFERENTIABLE_IN_TENSORS[func](*args, **(kwargs or {}))
        if func is torch.tensor and not any(isinstance(leaf, torch.Tensor) for leaf in iterate_leaves(args)):
            return self._construct(func, *args, **(kwargs or {}))
        if func is torch.Tensor.__setitem__ and fill_masked(*args):
            return None
        if func in (torch.autograd.grad, torch.Tensor.backward, torch.autograd.backward):
            with self.in_backward():
                return func(*args, **(kwargs or {}))
        return DIFFERENTIABLE.get(func, func)(*args, **(kwargs or {}))

    def _construct(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """A tensor that torch makes of Python's values: the trace's own, to which the function may write."""
        self._constructs = True
        try:
            return func(*args, **kwargs)
        finally:
            self._constructs = False

    def _check_backward(self, outputs: Any) -> None:
        """TraceError for a backward pass that reaches no tensor of the function, or may reach parameters outside."""
        outside = any(tensor.requires_grad for tensor, _ in self._lifted.values())
        if outside or not any(leaf.requires_grad for leaf in tree_leaves(outputs)):
            found = "closes over tensors that require grad" if outside else "has no tensor here that requires grad"
            raise TraceError(
                f".backward() at {where(user_source())} writes gradients into tensors, and the function {found}: the "
                "gradients of tensors from outside would be lost. Pass parameters as arguments and use "
                "torch.func.grad, torch.func.grad_and_value or torch.autograd.grad, which return gradients; or call "
                "x.requires_grad_() on an argument, then .backward(), and return x.grad."
            )

    def check_writes(self) -> None:
        """TraceError if an argument or a closed-over tensor was written to."""
        for fake, wrapped in self._tracked:
            written = self.finish(wrapped)
            if written is not fake:
                raise self.recorder.mutation(fake, self.recorder.source_of(written))

    def lift(self, leaf: Any) -> Any:
        """The functional fake tensor for a tensor made outside of the trace; any other value unchanged."""
        if not _is_outside(leaf):
            return leaf
        if id(leaf) not in self._lifted:
            # No torch.func transform may wrap the new tensor, and no function mode of a shard_map body cast it.
            with temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunction():
                with _disable_current_modes():
                    fake = self.recorder.lift(leaf)
                self._lifted[id(leaf)] = (leaf, self.functional(fake))
        return self._lifted[id(leaf)][1]


def _refuse_transformed(leaf: Any) -> None:
    """TraceError for a tensor from outside that a transform has wrapped: one from outside, if not one of the trace."""
    held = leaf
    while isinstance(held, torch.Tensor) and is_functorch_wrapped_tensor(held):
        held = get_unwrapped(held)
    if held is not leaf and not torch._is_functional_tensor(held) and not isinstance(held, FunctionalTensor):
        raise TraceError(
            "A jitted function closes over a tensor on which a transform acts, perhaps one from outside, at "
            f"{where(user_source())}. Pass it as an argument."
        )


def _is_outside(leaf: Any) -> bool:
    """Whether a value is a tensor that was made outside of the trace."""
    traced = type(leaf) not in _PLAIN or torch._is_functional_tensor(leaf) or is_functorch_wrapped_tensor(leaf)
    return not traced


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SPLITTERS = frozenset({torch.tensor_split, torch.Tensor.tensor_split})


def _is_list_of_tensors(args: tuple[Any, ...]) -> bool:
    listed = bool(args) and isinstance(args[0], (list, tuple))
    return listed and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args[0]))


def strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor inside of a traced function; None if they are those of a new tensor."""
    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor.elem)
    return None if tensor.stride() == make_contiguous_strides_for(tensor.shape) else tuple(tensor.stride())


def _memory(leaf: Any) -> torch.Tensor | None:
    """A tensor with the strides of a leaf; None if it has none."""
    strides = getattr(leaf, "strides", None)
    return None if strides is None else torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device="meta")


def _device(leaf: Any) -> torch.device:
    device = getattr(leaf, "device", None)
    return device if isinstance(device, torch.device) and device.type != "meta" else torch.device("cpu")


def _check_leaf(leaf: Any, path: str) -> None:
    if not has_meta(leaf) and not isinstance(leaf, CONSTANTS):
        got = f"{type(leaf).__name__} {leaf!r:.60}"
        raise TraceError(f"Argument {path} must be a tensor (got {got}). {leaf_remedy(leaf)}")


def _check_result(leaf: Any, path: str) -> None:
    if not isinstance(leaf, (torch.Tensor, torch.SymFloat, *CONSTANTS)):
        raise TraceError(
            f"Result{path} must be a tensor or a number (got {type(leaf).__name__} {leaf!r:.60}). "
            "Return tensors, numbers or text, or None for nothing."
        )


def _parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [named[index] if index < len(named) else f"arg{index}" for index in range(count)]
