"""Layers that are called again: the first is traced as ever, a later one as a program, which is called for the others,
with its derivative and what else transforms make of it.

Layers are modules, and functions under `jit` that a function under `jit` calls. They are equal if a program of one
serves the other: classes, the attributes that their code reads, training flags and ties, the shapes and dtypes of their
tensors, arguments that are no tensors, torch's settings, the transforms around, and what the code reads elsewhere. A
layer that changes what it is, draws by Python, or has hooks is traced each time, and so is one whose argument has gaps
in memory, or whose result shares memory other than as a view of an argument or of another result.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import optree
import torch
from torch import nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _disable_current_modes

from spmd.api.compile_log import log_reused
from spmd.api.hidden_state import HiddenState
from spmd.api.modules import holding
from spmd.api.programs.progress import report
from spmd.collectives.environment import bound_axes
from spmd.core.modules import ModuleStructure, Same
from spmd.core.pytree import tree_flatten
from spmd.core.static_key import static_key
from spmd.core.value_types import CONSTANTS
from spmd.errors import TraceError
from spmd.runtime.torch_settings import torch_settings
from spmd.tracing.active_transforms import unwrapped
from spmd.tracing.autograd_functions import needs_grad
from spmd.tracing.checkpointed import is_checkpointed
from spmd.tracing.closures import ClosureLifting
from spmd.tracing.draw_scopes import draw_scope
from spmd.tracing.memory_order import Order, memory_order
from spmd.tracing.recorder import Recorder
from spmd.tracing.running import running, running_trace

if TYPE_CHECKING:
    from spmd.tracing.loops.layer_calls import LayerProgram

LEAST = 12
"""The least number of operators of a layer: shorter ones are traced as fast as they are called."""

FEWEST = 6
"""The fewest modules of a class that are worth a program: it costs as much as tracing four layers."""

_Call: TypeAlias = Callable[..., Any]
_layers: ContextVar[_Layers | None] = ContextVar("spmd_reused_layers", default=None)


@contextlib.contextmanager
def reusing_layers(name: str, modules: bool) -> Iterator[None]:
    """A context in the trace of a function, in which equal layers are traced once.

    Args:
        name: the function.
        modules: whether it has any; else only functions under `jit` that it calls are layers.
    """
    layers = _Layers()
    token = _layers.set(layers)
    try:
        with _calls_of_modules(layers) if modules else contextlib.nullcontext():
            yield
    finally:
        _layers.reset(token)
        log_reused(name, layers.counts)


def call_function(function: _Call, key: Any, args: tuple[Any, ...]) -> Any:
    """Call a function under `jit` in a trace: by its program, if it was called before with equal arguments.

    Args:
        function: the function, of arguments by position.
        key: what the user has put under `jit`.
        args: the arguments.
    """
    layers = _layers.get()
    return function(*args) if layers is None else layers.call(function, key, args, {})


@contextlib.contextmanager
def _calls_of_modules(layers: _Layers) -> Iterator[None]:
    """A context in which calls of modules are those of layers, and reads of their attributes are noted."""
    call, get, get_missing = nn.Module.__call__, nn.Module.__getattribute__, nn.Module.__getattr__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not get(module, "_modules"):
            return call(module, *args, **kwargs)
        return layers.call(functools.partial(call, module), module, args, kwargs)

    thread = threading.get_ident()  # others run modules meanwhile

    def read(module: nn.Module, name: str) -> Any:
        if threading.get_ident() == thread:
            layers.note(module, name)
        return get(module, name)

    def missing(module: nn.Module, name: str) -> Any:
        # It looks for parameters in all attributes.
        with layers.unnoticed() if threading.get_ident() == thread else contextlib.nullcontext():
            return get_missing(module, name)

    patched: Any = nn.Module
    patched.__call__, patched.__getattribute__, patched.__getattr__ = called, read, missing
    try:
        yield
    finally:
        patched.__call__, patched.__getattr__ = call, get_missing
        del patched.__getattribute__


@attrs.frozen(eq=False)
class _Arguments:
    """A call of a layer.

    Args:
        key: what equal layers have in common.
        callee: the module, or what the user has put under `jit`.
        structure: that of the module; None of a function.
        leaves, tree: the arguments.
        places: the leaves that are tensors.
        tensors: those, and the module's.
    """

    key: Any
    callee: Any
    structure: ModuleStructure | None
    leaves: list[Any]
    tree: optree.PyTreeSpec
    places: list[int]
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, callee: Any, args: Any, kwargs: Any, trace: ClosureLifting) -> _Arguments | None:
        """A call; None of one whose arguments a program does not take."""
        leaves, tree = tree_flatten((args, kwargs))
        places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        others = [(n, leaf) for n, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)]
        if not all(isinstance(leaf, CONSTANTS) for _, leaf in others):
            return None
        structure, own = ModuleStructure.of(callee) if isinstance(callee, nn.Module) else (None, [])
        tensors = [*(leaves[n] for n in places), *own]
        orders = list(map(_order, tensors))
        if (structure is not None and structure.has_hooks) or None in orders:
            return None
        first: dict[int, int] = {}
        metas = [(x.shape, x.dtype, x.device, needs_grad(x), first.setdefault(id(x), n)) for n, x in enumerate(tensors)]
        constants = tuple((n, static_key(leaf)) for n, leaf in others)
        modes = tuple(key for key in torch_settings() if key is not trace)
        levels = tuple(each.level() for each in get_interpreter_stack() or ())
        around = Same(trace), torch.is_grad_enabled(), is_checkpointed(), levels, modes, _types(tensors)
        kind = Same(callee) if structure is None else type(callee)
        key = kind, tree, constants, tuple(zip(metas, orders, strict=True)), around
        return cls(key, callee, structure, leaves, tree, places, tensors)

    def run(self, call: _Call, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the layer with other tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=False):
            leaves[place] = tensor
        args, kwargs = self.tree.unflatten(leaves)
        with holding(self.structure, tensors[len(self.places) :]) if self.structure else contextlib.nullcontext():
            return call(*args, **kwargs)

    def is_unchanged(self, args: Any, kwargs: Any) -> bool:
        """Whether the module and the arguments are what they were before the call."""
        leaves, tree = tree_flatten((args, kwargs))
        structure, own = ModuleStructure.of(self.callee) if self.structure else (None, [])
        now = [*leaves, *own]
        before = [*self.leaves, *self.tensors[len(self.places) :]]
        return (
            tree == self.tree and structure == self.structure and all(x is y for x, y in zip(now, before, strict=True))
        )


def _order(x: torch.Tensor) -> Order | None:
    """The memory order of a tensor; None if a program does not take it."""
    held = unwrapped(x)
    return memory_order(x) if held.layout is torch.strided and not held.is_quantized else None


@contextlib.contextmanager
def _outside_of_traces() -> Iterator[None]:
    """A context in which the values of tensors from outside are read."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _types(tensors: Sequence[torch.Tensor]) -> Any:
    """The axes that are manual, and the types of tensors along them; None if none is manual in the trace."""
    if running_trace().recorder.observer is None:
        return None
    from spmd.tracing.loops.per_rank import types_of  # with rules, which `import spmd` leaves out

    return tuple(bound_axes().items()), tuple(tuple(types_of(x).items()) for x in tensors)


@attrs.define(eq=False)
class _Layer:
    """A layer that was called.

    Args:
        structure: that of its module.
        later: how often more it is traced before a program is made of it.
        reads: the attributes that it has read, by prefixes of its submodules.
        program: what was made of it, None before; False if it is traced each time.
        hidden: what its code reads beside the module.
        result: makes the result of its tensors.
    """

    structure: ModuleStructure | None
    later: int
    reads: set[tuple[str, str]]
    program: LayerProgram | Literal[False] | None = None
    hidden: HiddenState | None = None
    result: Callable[[Sequence[torch.Tensor]], Any] = list

    def is_like(self, given: _Arguments) -> bool:
        """Whether a call is one of an equal layer, of those with equal keys."""
        return self.structure is None or (
            given.structure is not None and given.structure.is_like(self.structure, self.reads)
        )

    def may_be_called(self) -> bool:
        """Whether there is a program, and what its code reads beside the module is what it was."""
        with _outside_of_traces():
            return self.hidden is not None and self.hidden.matches()

    def make(self, call: _Call, given: _Arguments) -> None:
        """Trace the layer as a program."""
        from spmd.tracing.loops.layer_calls import LayerProgram  # with rules, which `import spmd` leaves out

        self.program, callee = False, given.callee
        module = callee if given.structure else None
        with _outside_of_traces():
            hidden = HiddenState(callee, module, [None] * (1 + max(given.places, default=0)))
            hidden.prepare()
        reader = hidden.reader
        if reader.written or reader.iterators or reader.draws or reader.unwatched:
            return

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            leaves, tree = tree_flatten(given.run(call, tensors))
            found = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            if not all(isinstance(leaf, CONSTANTS) for n, leaf in enumerate(leaves) if n not in found):
                raise TraceError(f"{_name(callee)} returns what is neither a tensor nor a constant.")
            fixed = [None if n in found else leaf for n, leaf in enumerate(leaves)]

            def result(values: Sequence[torch.Tensor]) -> Any:
                filled = list(fixed)
                for n, value in zip(found, values, strict=True):
                    filled[n] = value
                return tree.unflatten(filled)

            self.result = result
            return [leaves[n] for n in found]

        try:
            made = LayerProgram.of(function, *given.tensors)
        except TraceError:  # as of a write to an argument: traced as a part of the function, it is none, or is raised
            return
        if made is not None:
            self.program, self.hidden = made, hidden


class _Layers:
    """The layers that a trace has called, and the traces of bodies of loops in it.

    Attributes:
        counts: how often a program was called in place of a layer, by the names of classes and functions.
    """

    def __init__(self) -> None:
        self._layers: dict[Any, list[_Layer]] = defaultdict(list)
        self._watching: list[set[tuple[int, str]]] = []
        self._known: set[int] = set()
        self._modules: dict[type, int] = defaultdict(int)
        self._calls: dict[type, int] = defaultdict(int)
        self.counts: dict[str, int] = defaultdict(int)

    def note(self, module: nn.Module, name: str) -> None:
        """Note that an attribute is read."""
        for reads in self._watching:
            reads.add((id(module), name))

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """A context in which reads are not noted."""
        before, self._watching = self._watching, []
        try:
            yield
        finally:
            self._watching = before

    def call(self, call: _Call, callee: Any, args: Any, kwargs: Any) -> Any:
        """The result of a module or of a function under `jit`: by its program, if an equal one was called before.

        Args:
            call: calls it with the arguments.
            callee: the module, or what the user has put under `jit`.
            args, kwargs: the arguments.
        """
        trace, given = running(), None
        if not isinstance(trace, ClosureLifting):
            return call(*args, **kwargs)
        with self.unnoticed(), torch._C.DisableTorchFunction():
            if self._is_repeated(callee) and not _is_special():
                given = _Arguments.of(callee, args, kwargs, trace)
        if given is None:
            return call(*args, **kwargs)
        self._report(type(callee))
        with self.unnoticed():
            layer = next((layer for layer in self._layers[given.key] if layer.is_like(given)), None)
        if layer is None:
            return self._first(call, given, args, kwargs, trace.recorder)
        if layer.program is None and layer.later == 0:
            layer.make(call, given)
        layer.later -= 1
        if not layer.program or not layer.may_be_called():
            return call(*args, **kwargs)
        with self.unnoticed():
            self.counts[_name(callee)] += 1
            results = layer.program(*given.tensors)
        for prefix, name in layer.reads:
            self.note(callee.get_submodule(prefix), name)
        return layer.result(results)

    def _report(self, kind: type) -> None:
        self._calls[kind] += 1
        if self._calls[kind] <= self._modules[kind]:
            report(f"{self._calls[kind]} of {self._modules[kind]} {kind.__name__}")

    def _is_repeated(self, module: Any) -> bool:
        """Whether there are several modules of a class, in those that were called; of functions nothing is known."""
        if not isinstance(module, nn.Module):
            return True
        if id(module) not in self._known:
            for each in module.modules():
                if id(each) not in self._known:
                    self._known.add(id(each))
                    self._modules[type(each)] += 1
        return self._modules[type(module)] >= FEWEST

    def _first(self, call: _Call, given: _Arguments, args: Any, kwargs: Any, recorder: Recorder) -> Any:
        scope = draw_scope()
        before = len(recorder.operations), recorder.regions.count, scope and scope.position
        self._watching.append(set())
        try:
            result = call(*args, **kwargs)
        finally:
            reads = self._watching.pop()
        after = len(recorder.operations), recorder.regions.count, scope and scope.position
        with self.unnoticed(), torch._C.DisableTorchFunction():
            if after[0] >= before[0] + LEAST and after[1:] == before[1:] and given.is_unchanged(args, kwargs):
                named = given.callee.named_modules() if given.structure else ()
                prefixes = {id(owner): prefix for prefix, owner in named}
                own = {(prefixes[owner], name) for owner, name in reads if owner in prefixes}
                self._layers[given.key].append(_Layer(given.structure, 0 if given.structure else 1, own))
        return result


def _name(callee: Any) -> str:
    return type(callee).__name__ if isinstance(callee, nn.Module) else getattr(callee, "__name__", "a function")


def _is_special() -> bool:
    """Whether forward mode, second derivatives, or hooks of all modules act on what is called.

    The second derivative of a program computes again what the first one reads.
    """
    kinds = [each.key() for each in get_interpreter_stack() or ()]
    twice = TransformType.Jvp in kinds or kinds.count(TransformType.Grad) > 1 or forward_ad._current_level >= 0
    return twice or torch_module._has_any_global_hook()
