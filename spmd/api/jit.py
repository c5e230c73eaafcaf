"""`jit`: turns a function for one device into a function of DTensors that runs on a mesh."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, Protocol, TypeVar, overload

import torch
from typing_extensions import ParamSpec

from spmd.api.compile_log import log_compile
from spmd.api.compiled import Compiled
from spmd.api.hidden_state import HiddenState
from spmd.api.methods import bound_to
from spmd.api.modules import (
    WithBuffers,
    WithModules,
    assign_buffers,
    buffer_leaves,
    module_of,
    set_buffers,
    with_self,
)
from spmd.api.parameters import SELF, ArgumentOrder, Parameters
from spmd.api.program_cache import CacheInfo, ProgramCache
from spmd.api.programs.never_gathered import KeepSharded
from spmd.api.programs.options import Comms, JitOptions, Options
from spmd.api.programs.result_specs import result_specs
from spmd.api.signature import CallArguments, Signature, split
from spmd.api.transforms.linearize import linearize_dtensors
from spmd.api.transforms.transformed import is_transformed
from spmd.api.value_warnings import ValueWarnings
from spmd.api.values.dtensor import DTensor
from spmd.api.values.torch_compile import keep_out_of_graphs
from spmd.collectives.distributed.agreement import failing_together, spans_processes
from spmd.core.compile_lock import COMPILING
from spmd.core.mesh import Mesh, Runtime, check_mesh, current_mesh, default_mesh
from spmd.core.pytree import broadcast_prefix, leaf_specs, tree_flatten, tree_leaves, with_module_states
from spmd.core.spec import FREE, DTensorSpec, has_meta
from spmd.errors import MeshError, PlanError, TraceError
from spmd.job import checks
from spmd.job.tracebacks import hides_internals
from spmd.lowering.program import LocalProgram
from spmd.runtime.agreement import first_run
from spmd.runtime.torch_settings import isolated, torch_settings
from spmd.tracing.constrain import constrain
from spmd.tracing.draw_scopes import Rng
from spmd.tracing.linearize import RecordingError, recorder
from spmd.tracing.running import AsWritten, running
from spmd.tracing.source import user_source, where
from spmd.tracing.traced import Traced

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spmd.inspect.plan import Plan
    from spmd.plan.machine.machine import Machine
    from spmd.rules.rule import Rule

linearize_dtensors()
keep_out_of_graphs()

_Arguments = ParamSpec("_Arguments")
_Rest = ParamSpec("_Rest")
_Instance = TypeVar("_Instance")
_Result = TypeVar("_Result")


class Jitted(Generic[_Arguments, _Result]):
    """A function under `jit`: it can be called, and shows the stages that a call goes through.

    The stages `trace`, `plan`, `lower` and `compile` take the arguments of a call; meta tensors or `TensorMeta`s can
    replace tensors. The stages are cached by signature: structure, shapes, dtypes, static arguments, mesh, and the
    settings of torch that a program depends on (`spmd.runtime.torch_settings`). The least recently used programs are
    dropped (`cache_info()`, `cache_clear()`); `spmd.log_compiles()` says why one is made.

    For type checkers it has the parameters and the result of the function: its results are `DTensor`s when it runs, and
    what the function says, such as `torch.Tensor`, by type. `isinstance(y, spmd.DTensor)` narrows one.
    """

    def __init__(
        self,
        function: Callable[_Arguments, _Result],
        in_specs: Any,
        out_specs: Any,
        mesh: Mesh | None,
        options: Options,
    ) -> None:
        module = module_of(function)
        taken = function if module is None else with_self(function)
        functools.update_wrapper(self, taken)  # type: ignore[arg-type]
        self.__wrapped__ = function
        self._in_specs, self._out_specs = in_specs, out_specs
        self._parameters = Parameters(taken, options, in_specs, {} if module is None else {SELF: module})
        self._mesh, self._options = None if mesh is None else check_mesh(mesh), options
        self._compiled: ProgramCache[Compiled[_Result]] = ProgramCache()
        self._changed: set[str] = set()  # what its traces have changed of what it reads
        # Of the last call: another one like it does not look up its signature.
        self._last: Compiled[_Result] | None = None
        self._newest: Compiled[_Result] | None = None
        self._warnings = ValueWarnings()

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By name, as a function is pickled and copied; of a method or a module, which are parts, by these."""
        if isinstance(self.__wrapped__, FunctionType):
            return str(self.__qualname__)  # type: ignore[attr-defined]
        return Jitted, (self.__wrapped__, self._in_specs, self._out_specs, self._mesh, self._options)

    @hides_internals
    def __call__(self, *args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        """Run the function on the mesh.

        On a distributed mesh this is a collective call. Inside another jitted function, the call becomes part of the
        outer program, with `in_specs` and `out_specs` as sharding constraints.

        Args:
            args: DTensors with the specs of `in_specs`, plain tensors, which are placed by `in_specs`, and static
                arguments.
            keywords: arguments by name; where it can, each takes its position in the function's signature.

        Returns:
            The result, with a DTensor by `out_specs` for each tensor. Under autograd and under transforms of
            `torch.func` from outside it has derivatives, which are programs too (`spmd.api.transforms`); there
            `donate_argnums` has no effect. Under autograd, plain tensors and parameters among the arguments get plain
            gradients, whole on each rank; DTensors get DTensors of their spec.

        Raises:
            DivergenceError: in the first call, ranks have different arguments or call different functions; under
                `init(check="calls")` in every call.
            SpmdError: another rank failed, or never makes the call.
            MeshError: no mesh, an abstract one, or one that differs from an argument's.
            ShardingError: specs that do not fit the arguments, or a DTensor whose spec is not that of `in_specs`.
            TraceError: the function cannot be traced into one static program; or a call while torch traces, or a
                closed-over tensor on which a transform acts.
            PlanError: no plan fits in `memory_limit`, the plan sends more than `comms` allows, or `plan` was made for
                another program, mesh or specs.
        """
        if self._parameters.bound:
            keywords = {**keywords, **self._parameters.bound}  # type: ignore[assignment]
        outer = running()
        if outer is not None:
            return self._uncompiled(args, keywords) if type(outer) is AsWritten else self._inline(args, keywords)
        if recorder():
            raise RecordingError(
                f"{self!r} was called while make_fx records, at {where(user_source())}. Put spmd.jit outside of it."
            )
        if checks.every_call and spans_processes(self._mesh_of(args, keywords)):
            compiled, call = self._lookup_together(args, keywords)
            given = call.leaves
            compiled.check_call(given, compiled.take_numbers(given) or ())
        last, layout = self._last, self._parameters.known(args, keywords)
        if last is not None and layout is not None and last.hidden.unchanged():
            static, dynamic = split(layout.positional(args, keywords), layout.static)
            flatten = last.flatten  # once: for a call in another thread it may become that of other modules
            leaves = flatten(dynamic)
            if leaves is not None and (numbers := last.take_numbers(leaves)) is not None and not is_transformed(leaves):
                key = torch_settings(), self._find_mesh(leaves), layout, static
                shards = last.match(key, leaves)
                if shards is not None:
                    self._compiled.hits += 1
                    return last.run(shards, leaves, numbers, flatten.structure)  # type: ignore[attr-defined]
        compiled, call = self._lookup_together(args, keywords)
        given, tree = call.leaves, call.tree
        taken = compiled.take_numbers(given) or ()
        if is_transformed(given):
            return compiled.transformed(given, taken, tree)
        result = compiled.run(compiled.place(given, taken), given, taken, tree)
        self._remember(compiled)
        return result

    def _remember(self, compiled: Compiled[_Result]) -> None:
        """Let the next call look at this program first."""
        last, self._last = self._last, compiled
        if last is not compiled:
            if last is not None:
                last.hidden.release()
            compiled.hidden.prepare()

    @hides_internals
    def trace(self, *args: object, **keywords: object) -> Traced:
        """The function as a flat program of functional operators over global tensors."""
        return self._stages(args, keywords).traced

    @hides_internals
    def plan(self, *args: object, **keywords: object) -> Plan:
        """The plan: a spec for every value, and every collective with its cause."""
        return self._stages(args, keywords).plan

    @hides_internals
    def lower(self, *args: object, **keywords: object) -> LocalProgram:
        """The program that each rank runs; `print(f.lower(*args).as_text())` shows it."""
        return self._stages(args, keywords).program

    @hides_internals
    def compile(self, *args: object, **keywords: object) -> Compiled[_Result]:
        """The compiled function for such arguments, which can be called; on a distributed mesh a collective call."""
        compiled, _ = self._lookup_together(args, {**keywords, **self._parameters.bound})
        compiled.prepare()
        return compiled

    def cache_info(self) -> CacheInfo:
        """How many programs are kept, of how many at most, and how many calls found theirs."""
        return self._compiled.info

    def cache_clear(self) -> None:
        """Drop all programs. On a distributed mesh all ranks must do so between the same calls."""
        self._compiled.clear()
        self._last = self._newest = None

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Jitted[_Arguments, _Result]: ...

    @overload
    def __get__(
        self: Jitted[Concatenate[_Instance, _Rest], _Result], instance: _Instance, owner: type | None = None
    ) -> Jitted[_Rest, _Result]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The function as a method: `in_specs` and argument numbers speak of what follows `self`, which is static."""
        return self if instance is None else bound_to(instance, self, self._bind_to)

    def _bind_to(self, instance: Any) -> Jitted[..., Any]:
        method = MethodType(self._parameters.function, instance)
        return Jitted(method, self._in_specs, self._out_specs, self._mesh, self._options)

    def __repr__(self) -> str:
        return f"spmd.jit({self._parameters.name})"

    def _stages(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Compiled[_Result]:
        keywords = {**keywords, **self._parameters.bound}
        with COMPILING:
            return self._lookup(args, keywords, self._mesh_of(args, keywords))[0]

    def _mesh_of(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Mesh:
        """The mesh of a call."""
        if self._mesh is not None:
            return self._mesh
        with COMPILING:  # a module holds tensors of a trace while another thread traces with it
            return self._find_mesh(tree_leaves(with_module_states((args, keywords))))

    def _find_mesh(self, leaves: Sequence[Any]) -> Mesh:
        """The mesh of a call: that of `jit` or of `use_mesh`, else that of the first DTensor; MeshError without one."""
        if self._mesh is not None:
            return self._mesh
        found = (leaf.mesh for leaf in leaves if isinstance(leaf, DTensor))
        return default_mesh() or next(found, None) or current_mesh()

    def _lookup(
        self, args: tuple[Any, ...], keywords: dict[str, Any], mesh: Mesh
    ) -> tuple[Compiled[_Result], CallArguments]:
        """The program for the signature of a call, and the arguments of the call.

        What is new is checked, and compiled stage by stage when used.
        """
        call = self._arguments(args, keywords)
        signature = Signature.of(call, mesh, self._in_specs)
        machine: Machine | None = None
        numbers = signature.numbers_of(call.leaves)
        if self._chooses_machine(mesh):
            with COMPILING:
                from spmd.plan.machine.default import default_machine  # not by `import spmd`

            machine = default_machine(mesh)
        key = signature, machine
        try:
            found = self._compiled.get(key, lambda program: program.holds_for(numbers) and program.hidden.matches())
        except TypeError:
            raise TraceError(
                f"Static arguments of {self!r} must be hashable (got "
                f"{[call.by_position[number] for number, _ in signature.static]}"
                "). Pass tuples for lists, or pass tensors as dynamic arguments."
            ) from None
        if found is None:
            found = self._new(key, call, signature, numbers)
        found.adopt(signature)
        self._newest = found
        return found, call

    def _arguments(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> CallArguments:
        return CallArguments.of(self._parameters.layout(args, keywords), args, keywords)

    def _new(
        self, key: Any, call: CallArguments, signature: Signature, numbers: tuple[float, ...]
    ) -> Compiled[_Result]:
        """A program for a signature that has none which holds."""
        layout, args = call.layout, call.by_position
        self._refuse_static_tensors(args, layout)
        count = len(layout.labels) - len(layout.keywords)
        known = [
            x if n in layout.static or isinstance(x, torch.nn.Module) else None for n, x in enumerate(args[:count])
        ]
        hidden = HiddenState(self.__wrapped__, self._parameters.bound.get(SELF), known)
        found: Compiled[_Result] = Compiled(
            self._parameters, call, signature, self._in_specs, self._out_specs, self._options, hidden, self._changed
        )
        last = self._newest
        access = None if last is None else last.hidden.failing()
        changes = [] if access is None else [HiddenState.difference(access)]
        log_compile(repr(self), signature, None if last is None else last.signature, changes)
        self._warnings.of_new(repr(self), signature, numbers, self._compiled.every(key))
        if access is not None:
            self._warnings.of_change(repr(self), access.label, changes[0])
        self._compiled.drop(lambda program: program.hidden.is_dead)
        self._compiled.add(key, found)
        return found

    def _lookup_together(
        self, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Compiled[_Result], CallArguments]:
        """As `_lookup`, in a call that all ranks make: an error on one rank is raised on all ranks."""
        mesh = self._mesh_of(args, keywords)
        call = first_run(mesh)
        with failing_together(call, mesh):
            if self._chooses_machine(mesh):
                with COMPILING:
                    from spmd.plan.machine.default import agree_on_machine  # not by `import spmd`

                with isolated():
                    agree_on_machine(mesh, call)
            with COMPILING:
                return self._lookup(args, keywords, mesh)

    def _chooses_machine(self, mesh: Mesh) -> bool:
        """Whether plans are for a machine that the ranks of a distributed mesh agree on."""
        options = self._options
        return mesh.runtime is Runtime.DISTRIBUTED and options.machine is None and options.plan is None

    def _refuse_static_tensors(self, args: tuple[Any, ...], layout: ArgumentOrder) -> None:
        for number in layout.static:
            if any(has_meta(leaf) for leaf in tree_leaves(args[number])):
                label, got = layout.labels[number], type(args[number]).__name__
                raise TraceError(
                    f"Static argument {label} of {self!r} holds a tensor (got {got}): every new one would be a new "
                    "program. Pass it as a dynamic argument, or close over it."
                )

    def _uncompiled(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call the function as it is written, under `spmd.disable_jit`."""
        with COMPILING:
            from spmd.api.uncompiled.counter_mode import drawing_by_counter
            from spmd.api.uncompiled.inside import is_inside  # few need them: `import spmd` leaves them out
            from spmd.api.uncompiled.whole import call_whole

        if is_inside():
            return self._inline(args, keywords)
        mesh, call = self._mesh_of(args, keywords), self._arguments(args, keywords)
        function = call.layout.by_position(self._parameters.function)
        if self._options.rng == "counter":
            function = drawing_by_counter(function)
        with_given = lambda given: function(*call.with_dynamic(given))  # noqa: E731
        prefix = call.layout.prefix(self._in_specs)

        def out_specs(result: Any, specs: Sequence[DTensorSpec | None]) -> Sequence[DTensorSpec | None]:
            arguments = call.layout.arguments(call.tree, specs)
            return result_specs(self._out_specs, result, mesh, arguments).specs

        if not call.has_modules:
            return call_whole(with_given, call.dynamic, mesh, prefix, out_specs, repr(self))
        leaves, tree = call.leaves, call.tree
        numbers, with_modules = buffer_leaves(tree), WithModules(lambda *given: with_given(given))
        kept = tuple(leaves[n].spec.pspec if isinstance(leaves[n], DTensor) else None for n in numbers)

        def with_buffers(result: WithBuffers, specs: Sequence[DTensorSpec | None]) -> list[DTensorSpec | None]:
            buffers = leaf_specs(kept, result.buffers, mesh, what="out_specs", item="buffer", optional=True)
            return [*out_specs(result.result, specs), *buffers]

        result = call_whole(lambda given: with_modules(*given), call.dynamic, mesh, prefix, with_buffers, repr(self))
        assign_buffers(tree, numbers, result.buffers)
        return result.result

    def _inline(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call the function in a trace that is running, with its specs as sharding constraints."""
        outer = current_mesh()
        if self._mesh is not None and self._mesh != outer:
            raise MeshError(
                f"{self!r} was made for {self._mesh} and is called in a function under jit on {outer}. "
                "Functions that call each other share one mesh."
            )
        call = self._arguments(args, keywords)
        placed = _constrain(call.layout.prefix(self._in_specs), call.dynamic, what="in_specs", of="the arguments")
        function = call.layout.by_position(self._parameters.function)
        if not call.has_modules:
            with COMPILING:
                from spmd.api.reuse import call_function  # few need it: `import spmd` leaves it out

            result = call_function(function, self._parameters.function, call.with_dynamic(placed))
        else:
            found = WithModules(function)(*call.with_dynamic(placed))
            set_buffers(call.tree, buffer_leaves(call.tree), found.buffers)
            result = found.result
        out_specs = None if self._out_specs is FREE else self._out_specs
        return _constrain(out_specs, result, what="out_specs", of="the result")


def _constrain(specs: Any, tree: Any, *, what: str, of: str) -> Any:
    leaves, structure = tree_flatten(tree)
    prefix = broadcast_prefix(specs, tree, what=what, of=of, optional=True)
    return structure.unflatten(
        [
            leaf if spec is None or not has_meta(leaf) else constrain(leaf, spec)
            for leaf, spec in zip(leaves, prefix, strict=True)
        ]
    )


class JitDecorator(Protocol):
    """A decorator that makes a `Jitted` of a function."""

    def __call__(self, function: Callable[_Arguments, _Result], /) -> Jitted[_Arguments, _Result]: ...


@overload
def jit(  # type: ignore[overload-overlap]  # what can be called is the function, not its specs
    function: Callable[_Arguments, _Result],
    in_specs: object = ...,
    out_specs: object = ...,
    /,
    **options: Unpack[JitOptions],
) -> Jitted[_Arguments, _Result]: ...


@overload
def jit(in_specs: object = ..., out_specs: object = ..., /, **options: Unpack[JitOptions]) -> JitDecorator: ...


@hides_internals
def jit(
    *positional: Any,
    in_specs: Any = None,
    out_specs: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    mesh: Mesh | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    comms: Comms = "allow",
    backend: Literal["eager", "inductor"] = "eager",
    machine: Machine | None = None,
    rules: Mapping[Any, Rule] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    memory_limit: int | str | None = None,
    keep_sharded: KeepSharded | None = None,
    reduce_dtype: torch.dtype | None = None,
    rng: Rng = "torch",
    reuse_layers: bool = True,
) -> Any:
    """Compile a function of global tensors into the program that each rank of a mesh runs.

    `@jit(in_specs, out_specs)` decorates; `jit(f, in_specs, out_specs)` wraps. The function is traced once for each
    signature, including its `torch.func` transforms, planned as a whole, and lowered to plain torch operators on shards
    with collectives between them. Modelled on `jax.jit` with `in_shardings` and `out_shardings`.

    Args:
        in_specs: a pytree prefix of the tuple of arguments that are not static, or a dict from names of parameters to
            prefixes. Its leaves are `P`s, or tuples of one placement for each mesh axis. Where it is None or names
            nothing, and for arguments that cannot go by position (keyword-only ones, `**kwargs`, those after one that
            is left to its default), a DTensor keeps its spec, and a plain tensor is replicated.
        out_specs: a pytree prefix of the result, with the same leaves. None inside the tree leaves the spec of these
            results to the planner: whatever is cheapest, with no reduction pending. If it is left out, a result of at
            least two tensors, or an item of a tuple or dict of results, takes the specs of an argument of equal
            structure, shapes and dtypes, and one tensor those of a donated argument, so that a state that goes in
            again finds its program (`docs/jit.md`); the rest, and all with `spmd.FREE`, is the planner's.
        in_shardings, out_shardings: JAX's names of `in_specs` and `out_specs`.
        mesh: the mesh; by default that of `use_mesh` when the function is called, else that of its first DTensor.
        static_argnums: positions of arguments without tensors, which must be hashable; each new value is a new program.
        static_argnames: names of such arguments, which may also be keyword-only.
        donate_argnums: positions of arguments that the caller does not use again: their memory is freed at their last
            use in the program, or holds a result. A donated DTensor cannot be read after the call. Plain tensors are
            copied when they are placed, so they stay valid.
        comms: limits of communication. `"error"` forbids collectives, and operators without a sharding rule, which
            would run replicated. A mapping limits kinds of collectives: `{"all_gather": 0, "all_reduce": "20MB"}`
            forbids all_gathers, and lets a rank send 20 MB per step in all_reduces.
        backend: `"eager"`; `"inductor"` is not available yet.
        machine: cost constants for the planner, such as `Machine.preset("h100_nvlink")`; by default those of the
            mesh's processes, which the ranks of a distributed mesh measure and agree on in their first call, and of a
            node like an H100's for other meshes.
        rules: sharding rules in place of `spmd.rules.RULES`: `RULES | {my_op: my_rule}`.
        memory_limit: the most bytes that a rank may hold at once, as `plan.memory` counts them: a number, or a text
            such as `"80GB"` or `"512MiB"`. If the fastest plan takes more, operations are reordered, values are
            rematerialized, and the plan is searched again with a price on memory, until it fits.
        plan: a plan to use instead of a search: a `Plan`, or the path of a file that `Plan.save` wrote, for example on
            an abstract mesh. It must have been made for the same program, mesh axes and specs.
        keep_sharded: arguments that are never gathered along given mesh axes, even where that would be faster:
            `{0: "model"}`. A key is an argument's position, the path of a part of one (`"0['params']"` or
            `"0.params"`), or the name of a tensor in `print(plan)`. Tensors that are not sharded along the axis are not
            constrained.
        reduce_dtype: the dtype of sums over ranks, for floating values of fewer bits: with `torch.float32`, partial
            sums in bfloat16 are cast, reduced, and the result is cast back. By default each value is reduced in its own
            dtype. The name is that of FSDP2's `MixedPrecisionPolicy`.
        rng: what torch's random operators in the function draw by. `"torch"`: its default generator, so that numbers
            are those of one device; each rank draws whole tensors. `"counter"`: keys of a seed that this generator
            draws at each call, and of the place in the function; each rank draws its shard (`docs/random.md`).
        reuse_layers: whether modules that are equal, but for the values of their tensors, and functions under `jit`
            that are called again, are traced once; the program is the same. And whether equal layers, but for the first
            and the last, are planned alike, by one search for all. `False` traces each call and plans each layer.

    Returns:
        A `Jitted`; without a function, a decorator that makes one. Type checkers see the parameters and the result of
        the function: tensors of the result are `DTensor`s when it runs, and `torch.Tensor` by type.

    Raises:
        PlanError: an option with a value that it does not accept.
        RuleError: `rules` is not a mapping of operators to rules.
        TraceError: `static_argnums` or `donate_argnums` are not integers.
        MeshError: `mesh` is not a mesh.

    >>> import torch
    >>> from spmd import P, make_mesh
    >>> mesh = make_mesh({"data": 2}, runtime="virtual")
    >>> double = jit(lambda x: x + x, P("data"), P("data"), mesh=mesh)
    >>> double(torch.arange(4.0)).full_tensor()
    tensor([0., 2., 4., 6.])
    """
    given = _first("in_specs", in_specs, "in_shardings", in_shardings)
    function, in_specs, out_specs = _parse(
        positional, given, _first("out_specs", out_specs, "out_shardings", out_shardings)
    )
    options = Options(
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        comms=comms,
        backend=backend,
        machine=machine,
        rules=rules,
        memory_limit=memory_limit,
        plan=plan,
        keep_sharded=keep_sharded,
        reduce_dtype=reduce_dtype,
        rng=rng,
        reuse_layers=reuse_layers,
    )
    if function is None:
        return lambda decorated: Jitted(decorated, in_specs, out_specs, mesh, options)
    return Jitted(function, in_specs, out_specs, mesh, options)


def _parse(positional: tuple[Any, ...], in_specs: Any, out_specs: Any) -> tuple[Callable[..., Any] | None, Any, Any]:
    if any(isinstance(item, Mesh) for item in positional):
        raise PlanError("jit takes the mesh by name (got it by position). Write mesh=mesh.")
    rest = list(positional)
    function = rest.pop(0) if rest and callable(rest[0]) else None
    if rest and in_specs is None:
        in_specs = rest.pop(0)
    if rest and out_specs is None:
        out_specs = rest.pop(0)
    if rest:
        raise PlanError(
            f"jit takes in_specs and out_specs once, after the function if it is given (got {len(positional)} "
            "positional arguments). Write @spmd.jit(in_specs, out_specs) or spmd.jit(f, in_specs, out_specs)."
        )
    return function, in_specs, out_specs


def _first(name: str, specs: Any, alias: str, others: Any) -> Any:
    """The specs that are given under one of two names."""
    if specs is not None and others is not None:
        raise PlanError(f"{alias} is JAX's name of {name}: give one of them (got both).")
    return others if specs is None else specs
