"""Modules as arguments of functions under `jit`: a function runs with tensors of the trace in place of theirs.

Buffers are the one exception to purity: what a function makes of them is a result, which is assigned after the call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import attrs
import optree
import torch
from torch import nn
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch._subclasses.functional_tensor import FunctionalTensor

from spmd.api.parameters import SELF
from spmd.api.values.dtensor import DTensor
from spmd.core.modules import ModuleState, ModuleStructure, structures_in
from spmd.core.pytree import NAMESPACE, tree_leaves, tree_map
from spmd.core.spec import DTensorSpec, P
from spmd.errors import TraceError
from spmd.ir.graph import Graph, Value
from spmd.ir.operator_kinds import COPIES
from spmd.tracing.source import user_source, where
from spmd.tracing.traced import Traced


@attrs.frozen(eq=False)
class WithBuffers:
    """The result of a function, and the buffers of the modules among its arguments, as it leaves them."""

    result: Any
    buffers: tuple[Any, ...]


class _Unnamed(optree.PyTreeEntry):  # type: ignore[misc]
    """The way to a child, of which paths show nothing."""

    def codify(self, /, node: str = "") -> str:
        """The code of the child: that of its parent."""
        return node


optree.register_pytree_node(
    WithBuffers,
    lambda node: ((node.result, node.buffers), None, None),
    lambda _, children: WithBuffers(*children),
    path_entry_type=_Unnamed,
    namespace=NAMESPACE,
)


class WithModules:
    """A function of modules as one of `ModuleState`s that returns `WithBuffers`.

    While it runs, the modules hold the tensors of their states: whatever refers to a module sees them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any) -> WithBuffers:
        """Call the function.

        Raises:
            TraceError: it returns a module, or assigns to a parameter.
        """
        states: list[ModuleState] = []

        def module_of(node: Any) -> Any:
            if not isinstance(node, ModuleState):
                return node
            states.append(node)
            return node.structure.module

        given = tree_map(module_of, args, is_leaf=lambda node: isinstance(node, ModuleState))
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(_installed(state)) for state in states]
            result = self._function(*given)
            _refuse_modules(result)
            pairs = zip(states, held, strict=True)
            buffers = tuple(buffer for state, tensors in pairs for buffer in _buffers(state.structure, tensors))
        return WithBuffers(result, buffers)


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module that a function is, or of which it is a method."""
    owner = function.__self__ if isinstance(function, MethodType) else function
    return owner if isinstance(owner, nn.Module) else None


def with_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """A module, or a method of one, as a function that takes the module as its keyword argument `self`."""
    method: Any = function.__func__ if isinstance(function, MethodType) else None

    def call(*args: Any, **keywords: Any) -> Any:
        module = keywords.pop(SELF)
        return module(*args, **keywords) if method is None else method(module, *args, **keywords)

    named_by = type(function) if method is None else method
    call.__name__, call.__qualname__, call.__doc__ = named_by.__name__, named_by.__qualname__, function.__doc__
    signature = inspect.signature(function if method else function.forward)  # type: ignore[attr-defined]
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    own = inspect.Parameter(SELF, inspect.Parameter.KEYWORD_ONLY)
    call.__signature__ = signature.replace(parameters=[*named, own, *rest])  # type: ignore[attr-defined]
    return call


def _installed(state: ModuleState) -> contextlib.AbstractContextManager[Sequence[torch.Tensor]]:
    """A context in which a module holds the tensors of a state: those that this yields."""
    structure = state.structure
    return holding(structure, [_held(structure, number, tensor) for number, tensor in enumerate(state.tensors)])


@contextlib.contextmanager
def holding(structure: ModuleStructure, tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    """A context in which a module holds other tensors, which this yields."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    stock = [vars(owner) for owner in structure.module.modules() if type(owner).__module__.startswith("torch.")]
    saved = [(attributes, dict(attributes)) for attributes in stock]  # a recurrent layer has lists of its parameters
    try:
        for places, tensor in zip(structure.slots, tensors, strict=True):
            for held, name in places:
                before.append((held, name, held[name]))
                held[name] = tensor
        _replace_aliases(structure, {id(value): held[name] for held, name, value in before}, before)
        yield tensors
    finally:
        for held, name, value in reversed(before):
            held[name] = value
        for attributes, values in saved:
            attributes.update(values)


def _held(structure: ModuleStructure, number: int, tensor: torch.Tensor) -> torch.Tensor:
    """What a module holds for a tensor: a copy of a buffer, which may be written to; a leaf of autograd."""
    if number >= structure.count:
        return tensor.clone()
    if tensor.requires_grad or not structure.requires_grad[number] or peek_interpreter_stack() is not None:
        return tensor
    is_traced = isinstance(tensor, FunctionalTensor)  # which nobody else holds
    return (tensor if is_traced else tensor.detach()).requires_grad_()


def _replace_aliases(
    structure: ModuleStructure, tensors: Mapping[int, torch.Tensor], before: list[tuple[dict[str, Any], str, Any]]
) -> None:
    """Replace tensors in lists and dicts that are attributes of a module, too."""
    for owner in structure.module.modules():
        attributes = vars(owner)
        for name, value in list(attributes.items()):
            if name in _STORES or type(value) not in (list, tuple, dict):
                continue
            if any(id(leaf) in tensors for leaf in tree_leaves(value)):
                before.append((attributes, name, value))
                attributes[name] = tree_map(lambda leaf: tensors.get(id(leaf), leaf), value)


_STORES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))


def _buffers(structure: ModuleStructure, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The buffers of a module after the function has run.

    Raises:
        TraceError: the function has assigned to a parameter, or something that is no tensor to a buffer.
    """
    for number, (name, places) in enumerate(zip(structure.names, structure.slots, strict=True)):
        held, key = places[0]
        now, label = held.get(key), f"{type(structure.module).__name__}.{name}"
        if number < structure.count and now is not tensors[number]:
            raise TraceError(
                f"The function under jit assigns to the parameter {label}, and arguments are never mutated. Return the "
                "new value, and assign it after the call; buffers are assigned."
            )
        if number >= structure.count:
            if not isinstance(now, torch.Tensor):
                raise TraceError(
                    f"The function under jit assigns {type(now).__name__} to the buffer {label}, which held a tensor. "
                    "A buffer of an argument is a tensor before and after a call."
                )
            yield now


def _refuse_modules(result: Any) -> None:
    for leaf in tree_leaves(result):
        if isinstance(leaf, nn.Module):
            raise TraceError(
                f"A function under jit returns a module ({type(leaf).__name__}), at {where(user_source())}. Return "
                "tensors, such as dict(model.named_parameters()); what it does to buffers of its arguments is assigned "
                "after the call."
            )


def buffer_leaves(tree: optree.PyTreeSpec) -> tuple[int, ...]:
    """The numbers of the leaves of arguments that are buffers of modules."""
    found = structures_in(tree)
    return tuple(n for first, held in found for n in range(first + held.count, first + len(held.names)))


def with_changed_buffers(traced: Traced, buffers: Sequence[int]) -> tuple[Traced, tuple[int, ...]]:
    """The trace of a function that `WithModules` has wrapped, without the buffers that stay as they are.

    Args:
        traced: the trace.
        buffers: the inputs that are buffers.

    Returns:
        The trace, whose last outputs are the buffers that the function changes, and the inputs that these are.
    """
    tree = traced.out_tree.child(0)
    results, graph = tree.num_leaves - len(traced.values), traced.graph
    graphs = [graph, *(other for _, other in graph.variants.graphs.values())] if graph.variants else [graph]
    changed = sorted({n for each in graphs for n in _changed(each, results, buffers)})
    kept = [*range(results), *(results + n for n in changed)]

    def select(each: Graph) -> Graph:
        variants = each.variants and each.variants.map(select)
        return attrs.evolve(each, outputs=tuple(each.outputs[n] for n in kept), variants=variants)

    inputs = tuple(buffers[n] for n in changed)
    paths = (*traced.output_paths[:results], *(traced.input_paths[n] for n in inputs))
    return attrs.evolve(traced, graph=select(graph), out_tree=tree, output_paths=paths), inputs


def _changed(graph: Graph, results: int, buffers: Sequence[int]) -> list[int]:
    """Which of the buffers are not what they were."""
    origins = [graph.origin(value, lambda operation: operation.op in COPIES) for value in graph.outputs[results:]]
    return [n for n, number in enumerate(buffers) if origins[n] is not graph.inputs[number]]


def buffer_spec(value: Value, spec: DTensorSpec) -> DTensorSpec:
    """The spec of a buffer after a call: that before, unless its shape changes."""
    kept = spec.complete.pspec if value.meta.shape == spec.meta.shape else P()
    return DTensorSpec.make(spec.mesh, kept, value.meta)


def set_buffers(tree: optree.PyTreeSpec, numbers: Sequence[int], values: Sequence[torch.Tensor]) -> None:
    """Let the modules among arguments hold other buffers.

    Args:
        tree: the structure of the arguments.
        numbers: which leaves the buffers are.
        values: their new values.
    """
    found = dict(zip(numbers, values, strict=True))
    for first, structure in structures_in(tree):
        for number, places in enumerate(structure.slots, first):
            for held, name in places if number in found else ():
                held[name] = found[number]


def assign_buffers(tree: optree.PyTreeSpec, numbers: Sequence[int], values: Sequence[torch.Tensor]) -> None:
    """As `set_buffers`, with results of a program. What was a plain tensor stays one, if it is replicated.

    Raises:
        TraceError: a transform from outside acts on a value, so that it is another for each element of a batch.
    """
    slots = {
        first + number: (places[0], name)
        for first, structure in structures_in(tree)
        for number, (places, name) in enumerate(zip(structure.slots, structure.names, strict=True))
    }
    kept = []
    for number, given in zip(numbers, values, strict=True):
        (held, key), name = slots[number]
        before, value = held[key], _value(given, name)
        if not isinstance(before, DTensor) and isinstance(value, DTensor) and value.spec.is_replicated:
            value = value.full_tensor().to(before.device)
        kept.append(value)
    set_buffers(tree, numbers, kept)


def _value(value: torch.Tensor, name: str) -> torch.Tensor:
    while is_functorch_wrapped_tensor(value):
        if is_batchedtensor(value):
            raise TraceError(
                f"The buffer {name} is updated in a function under torch.func.vmap, and would have a value for each "
                "element of the batch. Call model.eval(), or torch.func.replace_all_batch_norm_modules_(model)."
            )
        value = get_unwrapped(value)
    return value.detach()
