"""A module whose parameters and buffers become DTensors, one after the other: `distribute_module`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from spmd.api.values.distribute import check_same, check_source, place
from spmd.api.values.dtensor import DTensor
from spmd.collectives.distributed.agreement import failing_together, spans_processes
from spmd.collectives.distributed.scatter import Scatter
from spmd.core.mesh import Mesh, current_mesh
from spmd.core.modules import ModuleStructure, Slot, by_first_name
from spmd.core.pytree import SpecLike, leaf_meta, make_spec
from spmd.core.spec import DTensorSpec
from spmd.errors import ShardingError
from spmd.job.tracebacks import hides_internals

PartitionFn = Callable[[str, nn.Module, Mesh], Mapping[str, SpecLike] | None]

_DONE = "_spmd_is_distributed"


@hides_internals
def distribute_module(
    module: nn.Module,
    mesh: Mesh | None = None,
    partition_fn: PartitionFn | Mapping[str, SpecLike] | None = None,
    input_fn: Callable[[nn.Module, Any, Mesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, Mesh], Any] | None = None,
    *,
    src_rank: int | None = None,
) -> nn.Module:
    """Make the parameters and buffers of a module DTensors, in place; torch's function of this name.

    One tensor is placed after the other, and each replaces the plain one: beside what is there before, a rank holds the
    shards that it has so far and one tensor; or, with `src_rank`, a bucket of at most 16 MiB. Tied tensors stay tied,
    and parameters require gradients as before. Optimizers are to be made afterwards.

    On a distributed mesh this is a collective call.

    Args:
        module: the module.
        mesh: the mesh; by default that of `use_mesh`.
        partition_fn: is called with the dotted name of each submodule, the submodule, and the mesh. It returns specs
            for parameters and buffers of its own, by name; or assigns DTensors itself, as with torch, for instance by
            `module.weight = torch.nn.Parameter(spmd.distribute(module.weight, P("model"), mesh))`. Or it is a dict of
            specs by dotted names, as from `spmd.specs`, `fsdp_specs` and `tensor_parallel_specs`; a tied tensor may
            have any of its names. What it leaves is replicated.
        input_fn: becomes a forward pre-hook, called with the module, the tuple of its positional arguments, and the
            mesh; if it returns something, the module gets that instead.
        output_fn: becomes a forward hook, called with the module, its result, and the mesh; likewise.
        src_rank: as of `distribute`: the rank of the mesh whose tensors count, while others may have the module on the
            meta device. By default all ranks must have equal tensors.

    Returns:
        The module.

    Raises:
        ShardingError: no module, a spec that does not fit or names a tensor that the module lacks, a tied tensor with
            two specs, a tensor on the meta device, a module that was distributed before, a function of other arguments,
            or a `partition_fn` that returns something else.
        DivergenceError: ranks with different modules.
        MeshError: no mesh, or an abstract one; no rank `src_rank`.

    >>> import spmd
    >>> from spmd import P
    >>> mesh = spmd.make_mesh({"model": 2}, runtime="virtual")
    >>> layer = distribute_module(torch.nn.Linear(4, 6), mesh, lambda name, module, mesh: {"weight": P("model")})
    >>> layer.weight.spec.pspec, layer.bias.spec.pspec
    (P('model'), P())
    """
    mesh = current_mesh(mesh)
    call = f"distribute_module of {type(module).__name__} on {mesh}"
    with failing_together(call, mesh):
        if not isinstance(module, nn.Module):
            raise ShardingError(
                f"distribute_module takes an nn.Module (got {type(module).__name__}). For other trees of tensors, "
                "spmd.distribute(tree, specs, mesh)."
            )
        _refuse_distributed(module)
        for expected, hook in (
            ("input_fn must take (module, inputs, mesh)", input_fn),
            ("output_fn must take (module, outputs, mesh)", output_fn),
        ):
            _check_hook(expected, hook)
        mesh.require_processes()
        if src_rank is not None:
            mesh.coordinate(src_rank)  # a rank of the mesh
        state, targets = _targets(module, mesh, partition_fn)
    state.place(call, mesh, targets, src_rank)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda owner, inputs: input_fn(owner, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda owner, _, outputs: output_fn(owner, outputs, mesh))
    setattr(module, _DONE, True)
    return module


def specs_of(
    module: nn.Module, mesh: Mesh, partition_fn: PartitionFn | Mapping[str, SpecLike] | None
) -> dict[str, DTensorSpec]:
    """The spec that `distribute_module` would give each parameter and buffer, by each of its dotted names.

    Raises:
        ShardingError: as `distribute_module`.
    """
    _refuse_distributed(module)
    _, targets = _targets(module, mesh, partition_fn)
    by_slot = {(id(held), key): spec for slots, spec in targets.values() for held, key in slots}
    return {
        f"{prefix}.{key}" if prefix else key: by_slot[id(held), key]
        for prefix, owner in module.named_modules()
        for held in (owner._parameters, owner._buffers)
        for key in held
        if (id(held), key) in by_slot
    }


def _refuse_distributed(module: nn.Module) -> None:
    if getattr(module, _DONE, False):
        raise ShardingError(
            f"{type(module).__name__} was distributed before, by spmd.distribute_module or materialize."
        )


def _targets(
    module: nn.Module, mesh: Mesh, partition_fn: PartitionFn | Mapping[str, SpecLike] | None
) -> tuple[_State, dict[str, tuple[list[Slot], DTensorSpec]]]:
    """The places and the spec of each tensor that is to be placed."""
    state = _State(module)
    if isinstance(partition_fn, Mapping):
        return state, state.targets(mesh, state.by_slot(partition_fn))
    _check_hook("partition_fn must take (name, module, mesh)", partition_fn)
    return state, state.targets(mesh, _partition(module, mesh, partition_fn))


def _check_hook(expected: str, hook: Any) -> None:
    """Raise a ShardingError if something is no function of three arguments, or None."""
    if hook is None:
        return
    if not callable(hook):
        also = ", or be a dict of specs by dotted names" if expected.startswith("partition_fn") else ""
        raise ShardingError(f"{expected}{also} (got {type(hook).__name__} {hook!r:.80}).")
    try:
        inspect.signature(hook).bind(None, None, None)
    except TypeError as error:
        raise ShardingError(f"{expected}, but takes {inspect.signature(hook)}: {error}.") from None
    except ValueError:  # no signature is available
        return


def _partition(module: nn.Module, mesh: Mesh, partition_fn: PartitionFn | None) -> dict[tuple[int, str], SpecLike]:
    """What `partition_fn` returns: specs, by the id of the dict that holds the tensor, and its name there."""
    found: dict[tuple[int, str], SpecLike] = {}
    for path, owner in module.named_modules() if partition_fn else ():
        assert partition_fn is not None
        given, where = partition_fn(path, owner, mesh), f"{path or 'the module'}, a {type(owner).__name__}"
        if not isinstance(given, Mapping | None):
            raise ShardingError(
                f"partition_fn returned {type(given).__name__} {given!r:.80} for {where}. Return a dict from names of "
                "its own parameters and buffers to specs, or None where it assigns DTensors itself or leaves it whole."
            )
        for name, spec in (given or {}).items():
            held = next((kind for kind in (owner._parameters, owner._buffers) if kind.get(name) is not None), None)
            if held is None:
                own = [*owner._parameters, *owner._buffers]
                raise ShardingError(
                    f"partition_fn has a spec for {name!r} of {where}, whose "
                    f"own tensors are {', '.join(own) or 'none'}. Return names without the path."
                )
            found[id(held), name] = spec
    return found


class _State:
    """The places of the tensors of a module before it is partitioned; those of tied tensors together."""

    def __init__(self, module: nn.Module) -> None:
        structure, _ = ModuleStructure.of(module)
        self._places: list[tuple[Slot, ...]] = list(structure.slots)
        self._module, self._names = module, structure.names

    def by_slot(self, specs: Mapping[str, SpecLike]) -> dict[tuple[int, str], SpecLike]:
        """Specs by dotted names, as `_partition` returns them.

        Raises:
            ShardingError: a name that the module lacks, or a tied tensor with two specs.
        """
        given, places = by_first_name(specs, self._module), dict(zip(self._names, self._places, strict=True))
        for name in given:
            if name not in places:
                near = difflib.get_close_matches(str(name), places, n=3) or list(places)[:8]
                raise ShardingError(
                    f"There is a spec for {name!r}, which {type(self._module).__name__} lacks. It has "
                    f"{', '.join(near)}{' and others' if len(near) < len(places) else ''}. Name parameters and buffers "
                    "as named_parameters() does."
                )
        return {(id(held), key): spec for name, spec in given.items() for held, key in places[name][:1]}

    def targets(
        self, mesh: Mesh, specs: Mapping[tuple[int, str], SpecLike]
    ) -> dict[str, tuple[list[Slot], DTensorSpec]]:
        """For each tensor that is still to be placed, by its name, its places and its spec; ties DTensors again.

        Raises:
            ShardingError: a spec that does not fit its tensor, or a tied tensor with two.
        """
        known = {(id(held), key) for places in self._places for held, key in places}
        structure, _ = ModuleStructure.of(self._module)
        new = [  # what partition_fn has added
            (name, places)
            for name, places in zip(structure.names, structure.slots, strict=True)
            if not any((id(held), key) in known for held, key in places)
        ]
        found = {}
        for name, places in [*zip(self._names, self._places, strict=True), *new]:
            slots = [(held, key) for held, key in places if isinstance(held.get(key), torch.Tensor)]
            if any(nn.parameter.is_lazy(held[key]) for held, key in slots):
                raise ShardingError(f"{name} has no shape yet. Call the module once before it is distributed.")
            given = {(id(held), key): specs[id(held), key] for held, key in slots if (id(held), key) in specs}
            ready = [
                x for x in (held[key] for held, key in slots if (id(held), key) not in given) if isinstance(x, DTensor)
            ]
            metas = [leaf_meta(held[key], name) for held, key in slots[:1]]
            wanted = [value.spec for value in ready]
            wanted += [make_spec(mesh, spec, meta, where=name) for meta in metas for spec in given.values()]
            if len(set(wanted)) > 1:
                texts = " and ".join(sorted({repr(spec.pspec) for spec in wanted}))
                raise ShardingError(f"{name} is tied: one tensor, of which partition_fn makes {texts}. Choose one.")
            for held, key in slots if ready else ():
                held[key] = ready[0]
            for meta in () if ready else metas:
                found[name] = slots, wanted[0] if wanted else DTensorSpec.replicated(mesh, meta)
        return found

    def place(
        self, call: str, mesh: Mesh, targets: Mapping[str, tuple[list[Slot], DTensorSpec]], src_rank: int | None
    ) -> None:
        """Place tensors, each in the place of the plain one."""
        names = list(targets)
        leaves = [slots[0][0][slots[0][1]] for slots, _ in targets.values()]
        scatter = None
        if src_rank is None:
            with failing_together(call, mesh):
                _refuse_meta(names, leaves)
            check_same(call, mesh, names, leaves)
        elif spans_processes(mesh):
            check_source(call, mesh, names, leaves, src_rank)
            scatter = Scatter(mesh, src_rank)
        leaves.clear()  # each of them goes when it is replaced
        for name, (slots, spec) in targets.items():
            held, key = slots[0]
            requires, is_parameter = held[key].requires_grad, isinstance(held[key], nn.Parameter)
            placed: torch.Tensor = place(held[key], spec, name, scatter)
            if is_parameter:
                placed = nn.Parameter(placed, requires)
            for held, key in slots:
                held[key] = placed


def _refuse_meta(names: list[str], leaves: list[torch.Tensor]) -> None:
    """Raise a ShardingError for tensors without data."""
    for name, leaf in zip(names, leaves, strict=True):
        if leaf.is_meta:
            raise ShardingError(
                f"{name} is on the meta device and has no data. spmd.materialize(module, specs, mesh) runs the "
                "module's own initializers, each rank for its shards; or take the tensors of one rank by src_rank=0."
            )
