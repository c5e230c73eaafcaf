"""`materialize`: a module on the meta device gets its values by its own initializers, each rank its shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from spmd.api.module_initializers import AssignsData, Replaced, named_slots, run_own_initializers
from spmd.api.programs.options import Options
from spmd.api.programs.program import Program
from spmd.api.values.distribute_module import PartitionFn, distribute_module, specs_of
from spmd.api.values.dtensor import DTensor, wrap
from spmd.collectives.distributed.agreement import check_agreement, failing_together, spans_processes
from spmd.core.mesh import Mesh, current_mesh, use_mesh
from spmd.core.own_storage import own_storage
from spmd.core.pytree import SpecLike
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import ShardingError, TraceError
from spmd.ir.graph import Graph, Value
from spmd.ir.operator_kinds import COPIES
from spmd.ir.parts import Part, parts
from spmd.ir.simplify import eliminate_dead
from spmd.ir.unwritten import count, unwritten
from spmd.job.host_memory import release_freed_memory
from spmd.job.tracebacks import hides_internals
from spmd.random.generators.draw import DERIVE_KEY
from spmd.random.generators.implementations import GENERATORS
from spmd.tracing.draw_scopes import IMPL, Rng, drawing_by
from spmd.tracing.running import is_tracing
from spmd.tracing.source import where
from spmd.tracing.trace import trace
from spmd.tracing.traced import Traced

Initializer = Callable[[Any], object]
"""Writes the parameters and buffers of a module, or returns a module of equal names that has the values."""


@hides_internals
def materialize(
    module: nn.Module,
    specs: Mapping[str, SpecLike] | PartitionFn | None = None,
    mesh: Mesh | None = None,
    *,
    init: Initializer | None = None,
    rng: Rng = "counter",
) -> nn.Module:
    """Run the initializers of a module on the meta device, so that its parameters and buffers are DTensors; in place.

    The initializers are traced once, on tensors without memory. The program is split by parameters, and parts that
    compute alike are planned once: a rank holds its shards, and at most one tensor that an initializer needs whole
    (`torch.nn.init.orthogonal_`). Tied tensors stay tied. Parameters that have values already are distributed, unless
    an initializer writes to them. Optimizers are to be made afterwards.

    On a distributed mesh this is a collective call.

    Args:
        module: the module, made under `torch.device("meta")`.
        specs: as `partition_fn` of `distribute_module`: specs by dotted names, as from `spmd.specs` and `fsdp_specs`,
            or a function of submodules. What it leaves is replicated.
        mesh: the mesh; by default that of `use_mesh`.
        init: a function of the module that writes its parameters and buffers; or one that returns another module of
            equal names, whose values count: `lambda _: Model(config)` runs the constructor. By default
            `reset_parameters` of each submodule, inner ones first, and then `init_weights` of the module, which
            transformers, timm and torchtitan have.
        rng: as of `jit`. `"counter"`: numbers that are equal on every mesh, each rank draws its shards. `"torch"`: the
            numbers of one device after the same `torch.manual_seed`; each rank draws one whole tensor after the other.

    Returns:
        The module.

    Raises:
        ShardingError: no module, a spec that does not fit, a module that was distributed before, or a tensor that no
            initializer writes to, altogether or in part.
        TraceError: an initializer that reads values, or that a program cannot represent; a call in a traced function.
        DivergenceError: ranks with other modules, or generators in other states.
        MeshError: no mesh, or an abstract one.

    >>> import spmd
    >>> from spmd import P
    >>> mesh = spmd.make_mesh({"model": 2}, runtime="virtual")
    >>> with torch.device("meta"):
    ...     layer = nn.Linear(4, 6)
    >>> materialize(layer, {"weight": P("model")}, mesh).weight
    DTensor(f32[6,4] P('model') on Mesh(model=2), shards 2x[3,4])
    """
    mesh = current_mesh(mesh)
    call = f"materialize of {type(module).__name__} on {mesh}"
    with failing_together(call, mesh):
        if not isinstance(module, nn.Module):
            raise ShardingError(f"materialize takes an nn.Module on the meta device (got {type(module).__name__}).")
        if is_tracing():
            raise TraceError(f"materialize at {where()} stands in a function that is traced. Call it before.")
        if init is not None and not callable(init):
            raise ShardingError(f"init must be a function of the module (got {type(init).__name__} {init!r:.80}).")
        if rng not in ("counter", "torch"):
            raise ShardingError(f"rng must be 'counter' or 'torch' (got {rng!r:.60}).")
        mesh.require_processes()
        given = specs_of(module, mesh, specs)
        key = _new_key(mesh) if rng == "counter" else None
        with use_mesh(mesh):
            initialized = _Initialized.of(module, init or run_own_initializers, key)
        initialized.check(module)
        targets = initialized.targets(mesh, given)
    if spans_processes(mesh):
        pairs = zip(initialized.names, targets, strict=True)
        claims = {", ".join(names): f"{spec} on {spec.mesh}" for names, spec in pairs}
        claims["the seed"] = str(key if key is None else key.tolist())
        check_agreement(
            call,
            claims,
            "Every rank must have the same module and specs, and call torch.manual_seed before.",
            mesh.ranks,
        )
    places = named_slots(module)
    for numbers, values in initialized.run(mesh, targets, key):
        for number, value in zip(numbers, values, strict=True):
            initialized.assign(number, value, places)
        release_freed_memory()
    rest = {name: given[name].pspec for name in initialized.unchanged if name in given}
    return distribute_module(module, mesh, rest)


def _new_key(mesh: Mesh) -> torch.Tensor:
    """A key of a seed that torch's default generator draws, i64[2]."""
    seed = torch.empty((), dtype=torch.int64, device=mesh.device).random_(-(2**63), None)
    return GENERATORS[IMPL].seeded(seed)


@attrs.frozen(eq=False)
class _Initialized:
    """The tensors of a module as its initializers leave them.

    Args:
        graph: the program that computes them; its input is the key of all draws, if they are drawn by one.
        names: of each output of the program the names, those of tied tensors together.
        parameters: of each output whether it becomes a parameter that requires gradients; None for buffers.
        unchanged: the names of tensors with values that no initializer has written to.
    """

    graph: Graph
    names: tuple[tuple[str, ...], ...]
    parameters: tuple[bool | None, ...]
    unchanged: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module, init: Initializer, key: torch.Tensor | None) -> _Initialized:
        """Trace the initializers of a module."""
        names: dict[int, list[str]] = {}
        kinds: list[bool | None] = []
        before = {name: held[key] for name, (held, key) in named_slots(module).items()}
        if placed := [name for name, tensor in before.items() if isinstance(tensor, DTensor)]:
            raise ShardingError(
                f"{placed[0]} of {type(module).__name__} is a DTensor already. materialize takes a module of plain "
                "tensors, and places those with values, too."
            )

        def new(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().clone()

        def run(*keys: torch.Tensor) -> list[torch.Tensor]:
            draws = drawing_by(keys[0]) if keys else contextlib.nullcontext()
            with Replaced(module, new), AssignsData(), torch.no_grad():
                with draws:
                    found = init(module)
                slots = named_slots(found if isinstance(found, nn.Module) else module)
                _check_names(module, before, slots)
                tensors = {name: held[own] for name, (held, own) in slots.items()}
            outputs = {id(tensor): tensor for tensor in tensors.values()}
            for name, tensor in tensors.items():
                names.setdefault(id(tensor), []).append(name)
            kinds.extend(x.requires_grad if isinstance(x, nn.Parameter) else None for x in outputs.values())
            return [x.detach() for x in outputs.values()]

        traced = trace(run, () if key is None else (TensorMeta.of(key),), name=f"initialize {type(module).__name__}")
        graph = traced.graph
        constants = dict(graph.constants)
        origins = [constants.get(graph.origin(v, lambda operation: operation.op in COPIES)) for v in graph.outputs]
        groups = list(map(tuple, names.values()))
        kept = [n for n, origin in enumerate(origins) if origin is None or origin is not before[groups[n][0]]]
        graph = attrs.evolve(graph, outputs=tuple(graph.outputs[n] for n in kept))
        unchanged = tuple(name for n, group in enumerate(groups) if n not in kept for name in group)
        return cls(eliminate_dead(graph), tuple(groups[n] for n in kept), tuple(kinds[n] for n in kept), unchanged)

    def check(self, module: nn.Module) -> None:
        """Check that initializers write to all elements.

        Raises:
            ShardingError: they do not; the message has the names.
        """
        wrong = []
        for value, mask, names in zip(self.graph.outputs, unwritten(self.graph), self.names, strict=True):
            size = value.meta.numel
            missing = count(mask, size)
            if missing:
                owner = module.get_submodule(names[0].rpartition(".")[0])
                part = "" if missing == size else f", {missing} of {size} elements"
                wrong.append(f"{names[0]} {value.meta} of {type(owner).__name__}{part}")
        if wrong:
            shown = "\n  ".join([*wrong[:10], *([f"and {len(wrong) - 10} others"] if len(wrong) > 10 else [])])
            raise ShardingError(
                f"No initializer of {type(module).__name__} writes to:\n  {shown}\nWhat only a constructor computes "
                "is there if that runs: spmd.materialize(module, specs, mesh, init=lambda _: Model(...)). Or write it "
                "in a function of the module, init=function, or in a method reset_parameters() of its class."
            )

    def targets(self, mesh: Mesh, given: Mapping[str, DTensorSpec]) -> tuple[DTensorSpec, ...]:
        """The spec of each output.

        Raises:
            ShardingError: a spec does not fit what an initializer has assigned, or tied tensors have two.
        """
        found = []
        for value, names in zip(self.graph.outputs, self.names, strict=True):
            every = {given[name].pspec for name in names}
            if len(every) > 1:
                raise ShardingError(
                    f"{' and '.join(names)} are tied by an initializer: one tensor, with the specs "
                    f"{' and '.join(sorted(map(repr, every)))}. Choose one."
                )
            found.append(DTensorSpec.make(mesh, every.pop(), value.meta))
        return tuple(found)

    def run(
        self, mesh: Mesh, targets: Sequence[DTensorSpec], key: torch.Tensor | None
    ) -> Iterator[tuple[tuple[int, ...], list[DTensor]]]:
        """Run the program part by part: yields the numbers of outputs, and their values."""
        numbers = _drawn_numbers(self.graph)
        programs: dict[Hashable, Program] = {}
        options = Options(
            static_argnums=(), donate_argnums=(), comms="allow", backend="eager", machine=None, rules=None
        )
        for part in parts(self.graph, numbers.keys()):
            specs = tuple(targets[n] for n in part.outputs)
            found = part.key(), specs
            if found not in programs:
                programs[found] = _program(part, mesh, specs, options, self.names)
            assert key is not None or not part.graph.inputs
            keys = [_key_of(key, numbers.get(value)) for value in part.graph.inputs] if key is not None else []
            values = programs[found]([(each,) * len(mesh.held_coordinates) for each in keys])
            yield part.outputs, [wrap(value.spec, own_storage(*value.shards)) for value in values]

    def assign(self, number: int, value: DTensor, places: Mapping[str, tuple[dict[str, Any], str]]) -> None:
        """Let the module hold the value of an output."""
        requires_grad = self.parameters[number]
        held_as: torch.Tensor = value if requires_grad is None else nn.Parameter(value, requires_grad)
        for name in self.names[number]:
            held, own = places[name]
            held[own] = held_as


def _check_names(module: nn.Module, before: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise a ShardingError if initializers leave other names than the module had."""
    if differing := sorted(before.keys() ^ found.keys()):
        sides = "lacks" if differing[0] in before else "has"
        raise ShardingError(
            f"What initializes {type(module).__name__} {sides} {', '.join(differing[:5])}, unlike the module. Make "
            "both with the same arguments."
        )


def _drawn_numbers(graph: Graph) -> dict[Value, int]:
    """The keys that are made of the input and a number, each with the number."""
    found = {}
    for operation in graph.operations:
        if operation.op is DERIVE_KEY and operation.operands[0] in graph.inputs:
            number = graph.producers.get(operation.operands[1])
            if number is not None and number.op is torch.ops.aten.full.default:
                found[operation.tensors[0]] = number.args[1]
    return found


def _key_of(key: torch.Tensor, number: int | None) -> torch.Tensor:
    """The key that a number makes of a key; that itself for no number."""
    if number is None:
        return key
    data = torch.full((), number, dtype=torch.int64, device=key.device)
    return DERIVE_KEY(key, data, IMPL)  # type: ignore[no-any-return]


def _program(
    part: Part, mesh: Mesh, specs: tuple[DTensorSpec, ...], options: Options, names: Sequence[tuple[str, ...]]
) -> Program:
    label = ", ".join(names[n][0] for n in part.outputs[:3]) or "draws"
    in_specs = tuple(DTensorSpec.replicated(mesh, value.meta) for value in part.graph.inputs)
    return Program(Traced.flat(part.graph, f"initialize {label}"), mesh, in_specs, specs, frozenset(), options)
