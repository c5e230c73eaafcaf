"""Traces a function into a flat functional graph of aten operators over global tensors.

The function runs once, on fake tensors. Functionalization makes in-place operators on its own tensors functional. A
dispatch mode below it records each operator; `torch.func` transforms inside the function have been applied by then.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

import spmd.tracing.autograd_functions  # it hooks torch.autograd.Function
import spmd.tracing.initializers  # it hooks an initializer that reads values
import spmd.tracing.transformed_operands  # noqa: F401  # it hooks what wraps operands of torch.func
from spmd.core.compile_lock import COMPILING
from spmd.core.mesh import Coordinate
from spmd.core.pytree import leaf_remedy, tree_flatten
from spmd.core.spec import TensorMeta, has_meta
from spmd.core.value_types import CONSTANTS
from spmd.errors import TraceError
from spmd.ir.graph import Graph, Value
from spmd.ir.names import Namer
from spmd.ir.number import Number
from spmd.ir.variants import Variants
from spmd.tracing.checkpointed import checkpoints, recompute
from spmd.tracing.closures import ClosureLifting
from spmd.tracing.draw_scopes import Rng, drawing_by, seed_key, without_unused_seed
from spmd.tracing.effects import Generators, noticing, refuse_changes
from spmd.tracing.functionalization import Functionalization
from spmd.tracing.nested_tracers import nested_tracers
from spmd.tracing.numbers import Guards, number_of, traced
from spmd.tracing.recorder import Recorder
from spmd.tracing.running import is_tracing, running_in
from spmd.tracing.source import SourceTracker, read_files_again
from spmd.tracing.torch_state import restored
from spmd.tracing.traced import Traced, dynamic_paths, name_of


def trace(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    static_argnums: Sequence[int] = (),
    labels: Sequence[str] = (),
    name: str | None = None,
    rng: Rng = "torch",
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
        rng: what torch's random operators draw by: `"torch"`, its default generator, or `"counter"`, a key of a seed
            that this draws.

    Raises:
        TraceError: a leaf or a result that is no tensor and no constant, an in-place write to an argument or to a
            closed-over tensor, random numbers from a torch.Generator other than the default one, lasting changes of
            torch's state, or control flow on the value of a tensor.

    >>> traced = trace(lambda x: {"y": x.sin()}, (TensorMeta((2, 3), torch.float32),))
    >>> traced.output_paths, [str(operation.op) for operation in traced.graph.operations]
    (("['y']",), ['aten.sin.default'])
    """
    read_files_again()
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
    graph = trace_flat(
        flat, of_tensors(leaves), names=of_tensors(hints), paths=of_tensors(paths), reserved=reserved, rng=rng
    )
    paths, name = of_tensors(paths), name or name_of(function)
    return Traced(graph, in_tree, result["tree"], tuple(paths), result["paths"], name, guards, result["values"])


def trace_flat(
    function: Callable[..., Sequence[torch.Tensor]],
    leaves: Sequence[Any],
    *,
    names: Sequence[str] | None = None,
    paths: Sequence[str] | None = None,
    reserved: Sequence[str] = (),
    rng: Rng = "torch",
) -> Graph:
    """Trace a function from tensors to a sequence of tensors.

    Args:
        function: takes one tensor for each leaf and returns a list or tuple of tensors.
        leaves: anything with `shape` and `dtype`. The fake tensors have the device of the leaf if it has one, else the
            CPU: torch chooses operators by device. They have its `strides` if it has any, else they are contiguous.
        names: hints for the names of the inputs.
        paths: the paths of the leaves, for messages.
        reserved: names that no value has.
        rng: as of `trace`.

    Raises:
        TraceError: as in `trace`.
    """
    by_counter = rng == "counter"
    trace = functools.partial(
        _trace_once, _seeded(function) if by_counter else function, leaves, names, paths, reserved
    )
    with COMPILING:
        graph, lifting = trace(None)
        unevenness = lifting.unevenness
        if unevenness is not None:
            others = list(unevenness.coordinates())[1:]
            graphs = {unevenness.key(coordinate): (coordinate, trace(coordinate)[0]) for coordinate in others}
            graph = attrs.evolve(graph, variants=Variants(unevenness, graphs))
    return without_unused_seed(graph) if by_counter else graph


def _seeded(function: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Sequence[torch.Tensor]]:
    """A function whose random operators draw by a key of a seed."""

    def seeded(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        with drawing_by(seed_key()):
            return function(*tensors)

    return seeded


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
    with contextlib.closing(lifting):
        with (
            running_in(lifting),
            _no_modes_around(),
            checkpoints(recorder.regions),
            recorder,
            Functionalization(lifting.lift),
            lifting,
            restored() as before,
            noticing(random),
        ):
            outputs = function(*[lifting.functional(fake) for fake in fakes])
            again = lambda: function(*[lifting.functional(fake) for fake in fakes])  # noqa: E731
            random.refuse_changes()
            refuse_changes(before, again)
            outputs = [lifting.finish(tensor) for tensor in outputs]
            lifting.check_writes()
        results = tuple(recorder.value(tensor) for tensor in outputs)
        if recorder.observer is not None:
            for value in results:
                recorder.observer.check_result(value)
        graph = Graph(inputs, tuple(recorder.constants.items()), tuple(recorder.operations), results)
    return recompute(graph, recorder.regions, namer).verify(), lifting


@contextlib.contextmanager
def _no_modes_around() -> Iterator[None]:
    """A context in which transforms, dispatch modes, inference mode and grad mode from outside have no effect."""
    with (
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        nested_tracers(),
    ):
        yield


# In a trace, torch does not log shape errors of fake tensors: the error is raised anyway.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not is_tracing())


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
