"""One signature of a jitted function: its stages, each computed at its first use, and the call itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs
import optree
import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from spmd.api.call_check import CallCheck
from spmd.api.compile_log import log_taken
from spmd.api.hidden_state import HiddenState
from spmd.api.modules import WithModules, assign_buffers, buffer_leaves, buffer_spec, with_changed_buffers
from spmd.api.parameters import ArgumentOrder, Parameters
from spmd.api.program_cache import ProgramCache
from spmd.api.programs.options import Options
from spmd.api.programs.program import Program, StandIn
from spmd.api.programs.progress import stage
from spmd.api.programs.result_specs import result_specs
from spmd.api.side_effects import Surroundings
from spmd.api.signature import CallArguments, Signature, with_dynamic, with_gradients
from spmd.api.transforms.planned_function import PlannedFunction
from spmd.api.transforms.transformed import call, without_transforms
from spmd.api.value_warnings import warn_of_missing_gradients, warn_of_transforms
from spmd.api.values.arguments import check_argument
from spmd.api.values.communication import is_watched, record_comms
from spmd.api.values.distribute import check_same, place
from spmd.api.values.dtensor import DTensor
from spmd.api.values.leaves import DYNAMIC
from spmd.api.values.result_wrappers import ResultWrappers
from spmd.api.values.wrapper import Shards, donate_shards
from spmd.collectives.distributed.agreement import failing_together, spans_processes
from spmd.core.compile_lock import COMPILING, compiled_property
from spmd.core.flattener import Flattener, flattener
from spmd.core.mesh import use_mesh
from spmd.core.modules import structures_in
from spmd.core.pytree import leaf_specs, tree_leaves
from spmd.core.single_threaded import single_threaded
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.core.static_key import static_key
from spmd.errors import TraceError
from spmd.ir.graph import Graph
from spmd.ir.program_html import program_html
from spmd.job import checks
from spmd.lowering.program import LocalProgram
from spmd.runtime.agreement import first_run
from spmd.runtime.torch_settings import torch_settings
from spmd.tracing.active_transforms import called_by_transforms
from spmd.tracing.numbers import Guard
from spmd.tracing.trace import trace
from spmd.tracing.traced import Traced
from spmd.tracing.traced_tensor import TracedTensor

if TYPE_CHECKING:
    from spmd.inspect.plan import Plan


_Result = TypeVar("_Result")


class Compiled(Generic[_Result]):
    """A jitted function for one structure, and one shape and dtype of each argument.

    It is called with such arguments. `traced`, `plan`, and `program` are the stages of compilation.
    """

    def __init__(
        self,
        parameters: Parameters,
        call: CallArguments,
        signature: Signature,
        in_specs: Any,
        out_specs: Any,
        options: Options,
        hidden: HiddenState,
        changed: set[str],
    ) -> None:
        self.hidden, self._changed = hidden, changed
        self.mesh, self.options = signature.mesh, options
        self._parameters, self._out_specs, self.signature = parameters, out_specs, signature
        self._function = signature.layout.by_position(parameters.function)
        self._donated = signature.donated
        leaves, self._has_modules = call.leaves, call.has_modules
        if self._has_modules:
            self._function = WithModules(self._function)
        prefix, of = signature.layout.prefix(in_specs), signature.layout.described
        dynamic = signature.tree.unflatten(leaves)
        given = leaf_specs(prefix, dynamic, self.mesh, what="in_specs", of=of, optional=True, only_tensors=True)
        found = (spec or own for spec, own in zip(signature.tensors(given), signature.own, strict=True))
        self.in_specs: tuple[DTensorSpec, ...] = tuple(spec for spec in found if spec is not None)
        self._takes_plain = [own is None or own.is_replicated for own in signature.own]
        stand_ins = [StandIn(spec.meta, self.mesh.device) for spec in self.in_specs]
        self._others = [(n, None if key == DYNAMIC else leaves[n]) for n, key in reversed(signature.others)]
        self._numbers = tuple(leaves[position] for position in signature.numbers)
        self._differentiated = _requiring_grad(leaves)
        self._leaves = leaves
        self._leaves = self._with_leaves(stand_ins, self._numbers)
        self._args = call.with_dynamic(signature.tree.unflatten(self._leaves))
        self._key = signature.key
        self.flatten: Flattener = flattener(signature.tree)
        """Returns the leaves of the dynamic arguments of a call, if they have this structure; else None."""
        self._has_run = False
        self._updated: tuple[int, ...] = ()  # the inputs that are buffers which the function changes
        self._without_gradients: list[TensorMeta] = []
        self._guards: tuple[Guard, ...] | None = None  # until the program is made
        self._flats: ProgramCache[PlannedFunction] = ProgramCache()
        self._seen = list(self.in_specs)  # of the last call: comparing the same objects is faster

    @compiled_property
    def traced(self) -> Traced:
        """The function as one flat program, with copies of the tensors that it closes over, which may change later."""
        modules = (held.module for _, held in structures_in(self.signature.tree))
        around = Surroundings(self.hidden, modules, self._changed)
        with use_mesh(self.mesh), stage(self._parameters.name, "tracing"), single_threaded():
            try:
                traced = self._trace()
            except RuntimeError as error:
                if not self._differentiated or "not require grad" not in str(error):
                    raise
                static = self.signature.layout.static
                self._function = with_gradients(self._function, static, self._differentiated)
                traced = self._trace()
        around.warn()
        self.hidden.watch(tensor for _, tensor in traced.graph.constants)
        self._without_gradients = [TensorMeta.of(x) for _, x in traced.graph.constants if x.requires_grad]
        if self._has_modules:
            traced, self._updated = with_changed_buffers(traced, self._buffers)
        return attrs.evolve(traced, graph=_with_copies(traced.graph, {}))

    def _trace(self) -> Traced:
        layout, function = self.signature.layout, self._function
        if self.options.reuse_layers:
            modules = self._has_modules or bool(self.hidden.modules)
            function = _reusing_layers(function, self._parameters.name, modules)
        return trace(function, self._args, static_argnums=layout.static, labels=layout.labels, rng=self.options.rng)

    @property
    def _buffers(self) -> list[int]:
        """The inputs of the program that are buffers of modules."""
        return list(map(self.signature.positions.index, buffer_leaves(self.signature.tree)))

    @property
    def is_traced(self) -> bool:
        """Whether the function has been traced."""
        return "traced" in self.__dict__

    @compiled_property
    def staged(self) -> Program:
        """The traced function with its specs: the later stages."""
        outputs = self.traced.graph.outputs
        count = len(outputs) - len(self._updated)
        result = self.traced.result([value.meta for value in outputs[:count]], self._numbers)
        by_leaf = dict(zip(self.signature.positions, self.in_specs, strict=True))
        specs_of_leaves = [by_leaf.get(position) for position in range(self.signature.tree.num_leaves)]
        arguments = self.layout.arguments(self.signature.tree, specs_of_leaves)
        found = result_specs(self._out_specs, result, self.mesh, arguments)
        log_taken(self.traced.name, found.taken)
        values = dict(self.traced.values)
        given = (spec for position, spec in enumerate(found.specs) if position not in values)
        buffers = zip(outputs[count:], (self.in_specs[number] for number in self._updated), strict=True)
        specs = (*given, *(buffer_spec(value, spec) for value, spec in buffers))
        return Program(self.traced, self.mesh, self.in_specs, specs, self._donated, self.options)

    @compiled_property
    def _wrappers(self) -> ResultWrappers:
        return ResultWrappers(self.staged.out_specs, self.in_specs, self._donated)

    @functools.cached_property
    def check_call(self) -> CallCheck:
        """Compares a call with those of the other ranks, under `init(check="calls")`."""

        def is_random() -> bool:
            return any(operation.is_random for operation in self.traced.graph.operations)

        return CallCheck(self._function, self.signature, self.in_specs, functools.cache(is_random))

    @property
    def plan(self) -> Plan:
        """The plan: a spec for every value, and the collectives; errors as `Program.plan`."""
        return self.staged.plan

    @property
    def program(self) -> LocalProgram:
        """The lowered program that each rank runs."""
        return self.staged.local

    def __repr__(self) -> str:
        return f"Compiled({self.traced.name} for {self.signature.tree} on {self.mesh})"

    def _repr_html_(self) -> str:
        return program_html(repr(self), self.program.as_text())

    def prepare(self, leaves: Sequence[Any] | None = None) -> None:
        """Make all that a call needs, and check its arguments; on a distributed mesh a collective call.

        Ranks compare programs once. An error on one rank before they compare anything is raised on all ranks.

        Args:
            leaves: the flattened arguments; None to check none.

        Raises:
            DivergenceError: the ranks have different programs.
            MeshError: an abstract mesh, on which nothing can run, or a DTensor on another mesh.
            ShardingError: a DTensor whose spec differs, or an argument that is no tensor with data.
        """
        first = "staged" not in self.__dict__ or not self.staged.is_ready
        name = first_run(self.mesh) if first else self._call
        with failing_together(name, self.mesh, first or self._compares(leaves or ())):
            self._check_call(leaves)
        self._executable = self.staged.compile()
        self._guards = self.traced.guards.found

    @property
    def _call(self) -> str:
        """A call, in messages."""
        return f"a call of {self.traced.name} on {self.mesh}"

    def _compares(self, leaves: Sequence[Any]) -> bool:
        """Whether ranks compare the arguments of a call: in the first one, and plain tensors."""
        return not self._has_run or not all(isinstance(leaf, DTensor) for leaf in leaves)

    def _check_call(self, leaves: Sequence[Any] | None) -> None:
        """Make the program and check the arguments, without communication."""
        self.staged.check_runs()
        for leaf, spec, path in zip(leaves or (), self.in_specs, self.traced.input_paths, strict=leaves is not None):
            check_argument(leaf, spec, f"argument {path}")

    def __call__(self, *args: Any, **keywords: Any) -> _Result:
        """Run with arguments of this signature.

        Raises:
            TraceError: other static arguments, another structure, or other settings of torch than those of compilation.
            DivergenceError, MeshError, ShardingError: as `place`.
        """
        keywords = {**keywords, **self._parameters.bound}
        held, layout = self.signature, self._parameters.layout(args, keywords)
        if layout != held.layout:
            raise TraceError(
                f"{self!r} was compiled for arguments {', '.join(held.layout.labels)} (got "
                f"{', '.join(layout.labels)}). Call the jitted function instead."
            )
        with COMPILING:  # a module holds tensors of a trace while another thread traces with it
            call = CallArguments.of(layout, args, keywords)
            leaves = call.leaves
        if call.static != held.static:
            raise TraceError(f"{self!r} was compiled for other static arguments. Call the jitted function instead.")
        if call.tree != held.tree:
            raise TraceError(f"Compiled for arguments {held.tree} (got {call.tree}). Call the jitted function instead.")
        if torch_settings() != held.settings:
            raise TraceError(
                f"{self!r} was compiled under other settings of torch: autocast, the default dtype or device, function "
                "modes, the deterministic mode or the choice of kernels differ now. Call the jitted function instead, "
                "or restore them."
            )
        if checks.every_call and spans_processes(self.mesh):
            self.check_call(leaves)
        numbers = self.take_numbers(leaves)
        if numbers is None:
            raise TraceError(
                f"{self!r} was compiled for other values that are no tensors. Call the jitted function instead."
            )
        return self.run(self.place(leaves, numbers), leaves, numbers, call.tree)

    def flat(self, numbers: tuple[float, ...]) -> PlannedFunction:
        """The function of its flat tensors for given numbers, of which transforms from outside are programs too."""
        key = static_key(numbers)
        with COMPILING:
            found = self._flats.get(key)
            is_new = found is None
            if found is None:
                found = self._make_flat(numbers)
                self._flats.add(key, found)
        if is_new:
            warn_of_transforms(self.traced.name, self._flats.info.misses if numbers else 0)
        return found

    def _make_flat(self, numbers: tuple[float, ...]) -> PlannedFunction:
        def function(*leaves: torch.Tensor) -> list[torch.Tensor]:
            dynamic = self.signature.tree.unflatten(self._with_leaves(leaves, numbers))
            with called_by_transforms():
                result = self._function(*with_dynamic(self._args, self.signature.static, dynamic))
            if not self._has_modules:
                return _tensors(result)
            changed = dict(zip(self._buffers, result.buffers, strict=True))
            return [*_tensors(result.result), *(changed[number] for number in self._updated)]

        given = [None if spec is None else spec.pspec for spec in self.staged.given_out_specs]
        return PlannedFunction(function, self.mesh, self.in_specs, given, self.options, self.traced.name)

    def transformed(self, leaves: Sequence[Any], numbers: tuple[float, ...], tree: optree.PyTreeSpec) -> _Result:
        """Run the function on tensors on which transforms act, or of which autograd records the use; as `run`.

        On a distributed mesh ranks compare their plain tensors in the first call.
        """
        if not self.is_traced:
            self._differentiated = _requiring_grad(self._with_leaves(leaves, numbers))
        name, first = first_run(self.mesh), not self._has_run
        with failing_together(name, self.mesh, first):
            for leaf, spec, path in zip(leaves, self.in_specs, self.traced.input_paths, strict=True):
                if isinstance(leaf, DTensor) or leaf.is_meta:
                    check_argument(leaf, spec, f"argument {path}")
        if first:
            with temporarily_clear_interpreter_stack():
                self._compare(name, list(map(without_transforms, leaves)), numbers)
        if self._without_gradients and peek_interpreter_stack() is None:
            warn_of_missing_gradients(self.traced.name, self._without_gradients)
            self._without_gradients = []
        return self._finish(call(self.flat(numbers), leaves), numbers, tree)

    def _with_leaves(self, tensors: Sequence[Any], numbers: Sequence[float]) -> list[Any]:
        """The leaves of the dynamic arguments with these tensors and numbers."""
        leaves, signature = list(self._leaves), self.signature
        positions = (*signature.positions, *signature.numbers)
        for position, leaf in zip(positions, (*tensors, *numbers), strict=True):
            leaves[position] = leaf
        return leaves

    def _finish(self, values: Sequence[torch.Tensor], numbers: Sequence[float], tree: optree.PyTreeSpec) -> _Result:
        """The result of the function from what its program returns; buffers of modules are assigned."""
        count = len(values) - len(self._updated)
        if self._updated:
            positions = [self.signature.positions[number] for number in self._updated]
            assign_buffers(tree, positions, values[count:])
        return self.traced.result(values[:count], numbers)  # type: ignore[no-any-return]

    def take_numbers(self, leaves: list[Any]) -> tuple[float, ...] | None:
        """Take the leaves that are no tensors out of those of a call.

        Returns:
            The dynamic numbers; None if the program is not for these, or not for these static values.
        """
        if not self._others:
            return ()
        numbers = []
        for position, value in self._others:  # the last one first
            leaf = leaves.pop(position)
            if value is None and isinstance(leaf, float):
                numbers.append(leaf)
            elif value is None or (leaf is not value and static_key(leaf) != static_key(value)):
                return None
        numbers.reverse()
        return tuple(numbers) if self.holds_for(numbers) else None

    def holds_for(self, numbers: Sequence[float]) -> bool:
        """Whether the program is for the dynamic numbers of a call; one that is not traced yet is for its own."""
        if self._guards is not None:
            return not self._guards or self.failing(numbers) is None
        if static_key(tuple(numbers)) == static_key(self._numbers):
            return True
        if not self.is_traced:
            return False
        self.staged.lower()  # planning may need values, too
        return self.failing(numbers) is None

    def failing(self, numbers: Sequence[float]) -> Guard | None:
        """The first guard that does not hold for the dynamic numbers of a call."""
        return next((guard for guard in self.traced.guards.found if not guard.holds(numbers)), None)

    def adopt(self, signature: Signature) -> None:
        """Take the modules of a call of an equal signature: they may be others, or hold other tensors."""
        if self._has_modules and signature is not self.signature:
            self.signature = signature
            self.flatten = flattener(signature.tree)  # now: it compares with the modules as they are

    @property
    def layout(self) -> ArgumentOrder:
        """Which arguments it takes, in order."""
        return self.signature.layout

    def match(self, key: tuple[Any, ...], leaves: Sequence[Any]) -> list[Shards] | None:
        """The shards of a call's arguments, if its `Signature.key`, specs, shapes and dtypes are these; else None.

        Args:
            key: the key of the call's signature.
            leaves: what `flatten` returns for its dynamic arguments.
        """
        if key != self._key:
            return None
        try:
            specs = [leaf._spec for leaf in leaves]
        except AttributeError:
            return self._match_plain(leaves)
        if specs != self._seen:
            return None
        self._seen = specs
        return [leaf._shards for leaf in leaves]

    def _match_plain(self, leaves: Sequence[Any]) -> list[Shards] | None:
        """As `match`, of leaves of which some are not DTensors."""
        shards = []
        for leaf, spec, takes_plain in zip(leaves, self.in_specs, self._takes_plain, strict=True):
            if isinstance(leaf, DTensor):
                if leaf._spec != spec:
                    return None
                shards.append(leaf._shards)
            elif takes_plain and _fits(leaf, spec.meta):
                shards.append(place(leaf, spec)._shards)
            else:
                return None
        return shards

    def place(self, leaves: Sequence[Any], numbers: Sequence[float] = ()) -> list[Shards]:
        """The shards of the tensors among the arguments; plain tensors are placed by `in_specs`.

        On a distributed mesh ranks compare their plain tensors here. `match`, which later calls use, does not.

        Raises:
            DivergenceError: a plain tensor that differs between ranks, or as `prepare`.
            MeshError, ShardingError: as `prepare`.
        """
        compares = self._compares(leaves)
        self.prepare(leaves)
        if compares:
            self._compare(self._call, leaves, numbers)
        return [
            leaf._shards if isinstance(leaf, DTensor) else place(leaf, spec, f"argument {path}")._shards
            for leaf, spec, path in zip(leaves, self.in_specs, self.traced.input_paths, strict=True)
        ]

    def _compare(self, call: str, leaves: Sequence[Any], numbers: Sequence[float]) -> None:
        """Compare the arguments of all ranks; DivergenceError if they differ."""
        paths = (*self.traced.input_paths, *(self.signature.paths[position] for position in self.signature.numbers))
        check_same(call, self.mesh, [f"argument {path}" for path in paths], [*leaves, *numbers])
        self._has_run = True

    def run(
        self, shards: list[Shards], leaves: Sequence[Any], numbers: Sequence[float], tree: optree.PyTreeSpec
    ) -> _Result:
        """Run the program on shards, and wrap the shards of the results as DTensors.

        Args:
            shards: the shards of all arguments; the list is emptied.
            leaves: the tensors among the flattened arguments; those that are donated lose their shards.
            numbers: the dynamic numbers among them.
            tree: the structure of the dynamic arguments, of which modules get their changed buffers.
        """
        if is_watched():
            record_comms(self.program.collectives, self.traced.name, self.plan.suspicious_moves)
        donate_shards(map(leaves.__getitem__, self._donated))
        values = self._wrappers.wrap(self._executable(shards, numbers))
        self._wrappers.keep(leaves)
        return self._finish(values, numbers, tree)


def _reusing_layers(function: Callable[..., Any], name: str, modules: bool) -> Callable[..., Any]:
    """A function in whose trace equal layers are traced once."""
    from spmd.api.reuse import reusing_layers

    @functools.wraps(function)
    def reusing(*args: Any) -> Any:
        with reusing_layers(name, modules):
            return function(*args)

    return reusing


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _requiring_grad(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The positions of the tensors that require grad."""
    return tuple(n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)


def _with_copies(graph: Graph, copies: dict[int, torch.Tensor]) -> Graph:
    """The program with copies of its constants, by their ids: those of all variants share them."""
    constants = tuple((value, copies.setdefault(id(x), _copy(x))) for value, x in graph.constants)
    variants = graph.variants and graph.variants.map(lambda other: _with_copies(other, copies))
    return attrs.evolve(graph, constants=constants, variants=variants)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    copied = tensor.detach().clone()
    if copied.stride() == tensor.stride() or tensor.numel() == 0:
        return copied
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.detach().as_strided((span,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def _fits(leaf: Any, meta: TensorMeta) -> bool:
    """Test for a plain tensor with data, of a given shape and dtype; modules of another thread's trace have none."""
    plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, TracedTensor) and not leaf.is_meta
    return plain and leaf.dtype is meta.dtype and tuple(leaf.shape) == meta.shape
