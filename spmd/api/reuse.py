"""Layers that are called again with equal structures: the first is traced as ever, the second as a program, which is
called for the others, with its derivative and what else transforms make of it.

Layers are equal if a program of one serves the other: classes, the attributes that their code reads, training flags and
ties, the shapes and dtypes of their tensors, arguments that are no tensors, torch's settings, the transforms around,
and what the code reads elsewhere. A layer that changes what it is, draws by Python, has hooks, or returns what is no
tensor of its own is traced each time.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import attrs
import optree
import torch
from torch import nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from spmd.api.compile_log import log_reused
from spmd.api.hidden_state import HiddenState
from spmd.api.modules import holding
from spmd.core.modules import ModuleStructure
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
from spmd.tracing.loops.calls import call_subprogram, subprogram
from spmd.tracing.loops.constructs import Subprogram
from spmd.tracing.running import running

LEAST = 12
"""The least number of operators of a layer: shorter ones are traced as fast as they are called."""

FEWEST = 6
"""The fewest modules of a class that are worth a program: it costs as much as tracing four layers."""

_Call: TypeAlias = Callable[..., Any]


@contextlib.contextmanager
def reusing_layers(name: str) -> Iterator[None]:
    """A context in the trace of a function of some name, in which equal layers are traced once."""
    trace = running()
    if not isinstance(trace, ClosureLifting):
        yield
        return
    layers = _Layers(trace)
    call, get, get_missing = nn.Module.__call__, nn.Module.__getattribute__, nn.Module.__getattr__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if running() is not trace or not get(module, "_modules"):
            return call(module, *args, **kwargs)
        return layers.call(call, module, args, kwargs)

    def read(module: nn.Module, name: str) -> Any:
        layers.note(module, name)
        return get(module, name)

    def missing(module: nn.Module, name: str) -> Any:
        with layers.unnoticed():  # it looks for parameters in all attributes
            return get_missing(module, name)

    patched: Any = nn.Module
    patched.__call__, patched.__getattribute__, patched.__getattr__ = called, read, missing
    try:
        yield
    finally:
        patched.__call__, patched.__getattr__ = call, get_missing
        del patched.__getattribute__
        log_reused(name, layers.counts)


@attrs.frozen(eq=False)
class _Arguments:
    """A call of a layer.

    Args:
        key: what equal layers have in common.
        structure: the module.
        leaves, tree: the arguments.
        places: the leaves that are tensors.
        tensors: those, and the module's.
    """

    key: Any
    structure: ModuleStructure
    leaves: list[Any]
    tree: optree.PyTreeSpec
    places: list[int]
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, module: nn.Module, args: Any, kwargs: Any, trace: ClosureLifting) -> _Arguments | None:
        """A call; None of one whose arguments a program does not take."""
        leaves, tree = tree_flatten((args, kwargs))
        places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        others = [(n, leaf) for n, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)]
        if not all(isinstance(leaf, CONSTANTS) for _, leaf in others):
            return None
        structure, own = ModuleStructure.of(module)
        tensors = [*(leaves[n] for n in places), *own]
        if structure.has_hooks or not all(map(_is_plain, tensors)):
            return None
        first: dict[int, int] = {}
        metas = [(x.shape, x.dtype, x.device, needs_grad(x), first.setdefault(id(x), n)) for n, x in enumerate(tensors)]
        constants = tuple((n, static_key(leaf)) for n, leaf in others)
        modes = tuple(key for key in torch_settings() if key is not trace)
        levels = tuple(each.level() for each in get_interpreter_stack() or ())
        around = torch.is_grad_enabled(), is_checkpointed(), levels, modes
        return cls((type(module), tree, constants, tuple(metas), around), structure, leaves, tree, places, tensors)

    def run(self, call: _Call, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the layer with other tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=False):
            leaves[place] = tensor
        args, kwargs = self.tree.unflatten(leaves)
        with holding(self.structure, tensors[len(self.places) :]):
            return call(self.structure.module, *args, **kwargs)

    def is_unchanged(self, args: Any, kwargs: Any) -> bool:
        """Whether the module and the arguments are what they were before the call."""
        leaves, tree = tree_flatten((args, kwargs))
        structure, own = ModuleStructure.of(self.structure.module)
        now = [*leaves, *own]
        before = [*self.leaves, *self.tensors[len(self.places) :]]
        return (
            tree == self.tree and structure == self.structure and all(x is y for x, y in zip(now, before, strict=True))
        )


def _is_plain(x: torch.Tensor) -> bool:
    held = unwrapped(x)
    return held.layout is torch.strided and x.is_contiguous() and not held.is_quantized


@attrs.define(eq=False)
class _Layer:
    """A layer that was called once.

    Args:
        structure: its module.
        reads: the attributes that it has read, by prefixes of its submodules.
        program: what was made of it, None before; False if it is traced each time.
        hidden: what its code reads beside the module.
        constants: the tensors that the program closes over.
        result: makes the result of its tensors.
    """

    structure: ModuleStructure
    reads: set[tuple[str, str]]
    program: Subprogram | bool | None = None
    hidden: HiddenState | None = None
    constants: tuple[torch.Tensor, ...] = ()
    result: Callable[[Sequence[torch.Tensor]], Any] = list

    def make(self, call: _Call, given: _Arguments) -> None:
        """Trace the layer as a program."""
        self.program, module = False, given.structure.module
        hidden = HiddenState(module, module, [None] * (1 + max(given.places, default=0)))
        reader = hidden.reader
        if reader.written or reader.iterators or reader.draws or reader.unwatched:
            return

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            leaves, tree = tree_flatten(given.run(call, tensors))
            found = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            if not all(isinstance(leaf, CONSTANTS) for n, leaf in enumerate(leaves) if n not in found):
                raise TraceError(f"{type(module).__name__} returns what is neither a tensor nor a constant.")
            fixed = [None if n in found else leaf for n, leaf in enumerate(leaves)]

            def result(values: Sequence[torch.Tensor]) -> Any:
                filled = list(fixed)
                for n, value in zip(found, values, strict=True):
                    filled[n] = value
                return tree.unflatten(filled)

            self.result = result
            return [leaves[n] for n in found]

        try:
            made = subprogram(function, *given.tensors)
        except TraceError:  # as of a write to an argument: traced as a part of the function, it is none, or is raised
            return
        if made is not None:
            (self.program, self.constants), self.hidden = made, hidden
            hidden.prepare()


class _Layers:
    """The layers that a trace has called.

    Args:
        trace: the trace.

    Attributes:
        counts: how often a program was called in place of a layer, by the names of classes.
    """

    def __init__(self, trace: ClosureLifting) -> None:
        self._trace = trace
        self._layers: dict[Any, list[_Layer]] = defaultdict(list)
        self._watching: list[set[tuple[int, str]]] = []
        self._known: set[int] = set()
        self._modules: dict[type, int] = defaultdict(int)
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

    def call(self, call: _Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of a module: by its program, if an equal one was called before."""
        given = None
        with self.unnoticed(), torch._C.DisableTorchFunction():
            if self._is_repeated(module) and not _is_special(self._trace):
                given = _Arguments.of(module, args, kwargs, self._trace)
        if given is None:
            return call(module, *args, **kwargs)
        with self.unnoticed():
            like = (x for x in self._layers[given.key] if given.structure.is_like(x.structure, x.reads))
            layer = next(like, None)
        if layer is None:
            return self._first(call, given, args, kwargs)
        if layer.program is None:
            layer.make(call, given)
        if not isinstance(layer.program, Subprogram) or layer.hidden is None or not layer.hidden.matches():
            return call(module, *args, **kwargs)
        with self.unnoticed():
            self.counts[type(module).__name__] += 1
            results = call_subprogram(layer.program, *given.tensors, *layer.constants)
        for prefix, name in layer.reads:
            self.note(module.get_submodule(prefix), name)
        return layer.result(results)

    def _is_repeated(self, module: nn.Module) -> bool:
        """Whether there are several modules of a class, in those that were called."""
        if id(module) not in self._known:
            for each in module.modules():
                if id(each) not in self._known:
                    self._known.add(id(each))
                    self._modules[type(each)] += 1
        return self._modules[type(module)] >= FEWEST

    def _first(self, call: _Call, given: _Arguments, args: Any, kwargs: Any) -> Any:
        module, recorder, scope = given.structure.module, self._trace.recorder, draw_scope()
        before = len(recorder.operations), recorder.regions.count, scope and scope.position
        self._watching.append(set())
        try:
            result = call(module, *args, **kwargs)
        finally:
            reads = self._watching.pop()
        after = len(recorder.operations), recorder.regions.count, scope and scope.position
        with self.unnoticed():
            if after[0] >= before[0] + LEAST and after[1:] == before[1:] and given.is_unchanged(args, kwargs):
                prefixes = {id(owner): prefix for prefix, owner in module.named_modules()}
                own = {(prefixes[owner], name) for owner, name in reads if owner in prefixes}
                self._layers[given.key].append(_Layer(given.structure, own))
        return result


def _is_special(trace: ClosureLifting) -> bool:
    """Whether forward mode, second derivatives, hooks of all modules, or the types of shards act on what is called.

    The second derivative of a program computes again what the first one reads.
    """
    kinds = [each.key() for each in get_interpreter_stack() or ()]
    twice = TransformType.Jvp in kinds or kinds.count(TransformType.Grad) > 1 or forward_ad._current_level >= 0
    return twice or torch_module._has_any_global_hook() or trace.recorder.observer is not None
