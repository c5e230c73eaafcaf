"""The machine of a mesh where the user gives none.

Virtual and abstract meshes stand for a cluster, and have the constants of a node like an H100's. A distributed mesh has
those of its processes, which all ranks measure together, once for each kind of job: rank 0 saves them in the cache
folder. Where GPUs have a preset, it knows the links, and rank 0 measures the rest: a preset has the rates of a data
sheet, and operators that cost nothing. Ranks agree in the first call of a jitted function, which is a collective call;
a plan that is made before has what this rank's file says, without communication.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
import torch.distributed as dist

from spmd.collectives.distributed.agreement import gather
from spmd.collectives.transport.process_groups import backend
from spmd.core.mesh import Mesh, Runtime
from spmd.job.process import process_index
from spmd.plan.machine.cache import load_machine, save_machine
from spmd.plan.machine.hosts import assumed_hosts, device_name, gather_hosts, hosts_along
from spmd.plan.machine.machine import Machine

FORMAT = 12
"""The version of the files; what is measured in another way has another."""

NETWORK = MappingProxyType({"bandwidth": 5e10, "latency": 5e-6})
"""The constants of mesh axes across hosts, where a preset has those within one: 400 Gb/s for each GPU."""

_GPUS = (("H100 80GB HBM3", "h100_nvlink"), ("NVIDIA H200", "h200"), ("A100-SXM4-80GB", "a100"))
"""The presets of GPUs, by a part of the name that torch has for them."""

_OF_RANKS = (
    "flops", "dtype_flops", "memory_bandwidth", "memory_overlap", "write_allocate", "operator_latency",
    "transcendental_seconds", "overlap", "fuses",
)  # fmt: skip
"""The constants that do not depend on the axes: all meshes of a job have the same, so that their plans compare."""

_UNKNOWN = Machine(origin="default, like an H100 in one node")

_UNMEASURED = Machine(origin=f"{_UNKNOWN.origin}, because nothing was measured before the first call of a function")

# A job that is stopped and started again, as in tests, has another world group.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Mesh, Machine]] = weakref.WeakKeyDictionary()


def default_machine(mesh: Mesh) -> Machine:
    """The machine of a mesh, without communication; on a distributed mesh ranks may differ until they agree."""
    if mesh.runtime is not Runtime.DISTRIBUTED or not dist.is_initialized():
        return _UNKNOWN
    if found := _agreed_here().get(mesh):
        return found
    hosts = assumed_hosts(mesh)
    return _saved(mesh, hosts) or _preset(mesh, hosts) or _UNMEASURED


def agree_on_machine(mesh: Mesh, call: str) -> None:
    """Agree with all ranks on the machine of a distributed mesh, if they have not yet; a collective call.

    The first rank decides: by its file, or by its GPU. If it has none, all ranks measure.

    Args:
        mesh: the mesh; nothing happens on others than distributed ones.
        call: the user's call that needs this, as for `gather`.

    Raises:
        DivergenceError, SpmdError: as `gather`.
    """
    if mesh.runtime is not Runtime.DISTRIBUTED or mesh in _agreed_here():
        return
    call = f"the choice of a machine for {call}"
    hosts = gather_hosts(call, mesh)
    is_first = process_index() == mesh.ranks[0]
    found, like = gather(call, _known(mesh, hosts) if is_first else (None, None), mesh.ranks)[0]
    if found is None:
        found = Machine.measure(mesh)
        found = _with_ranks(found, like, found.origin) if like else found
    if is_first and _saved(mesh, hosts) is None:
        _save(mesh, hosts, found, like or found)
    _agreed_here()[mesh] = found


def _known(mesh: Mesh, hosts: tuple[int, ...]) -> tuple[Machine | None, Machine | None]:
    """The machine of a mesh as far as a rank knows it alone; and one with the same ranks, if the first is not saved."""
    if found := _saved(mesh, hosts):
        return found, None
    like, preset = load_machine(_about_ranks(mesh, hosts)), _preset(mesh, hosts)
    if preset is None:
        return None, like
    like = like or Machine.measure(Mesh(("rank",), (1,), mesh.runtime, mesh.device, (process_index(),)))
    return _with_ranks(preset, like, f"{like.origin}, links of {preset.origin}"), like


def _agreed_here() -> dict[Mesh, Machine]:
    """The machines that the ranks of this job have agreed on."""
    world = dist.group.WORLD
    assert world is not None, "make_mesh starts torch.distributed"
    return _agreed.setdefault(world, {})


def _saved(mesh: Mesh, hosts: tuple[int, ...]) -> Machine | None:
    """What was measured on a mesh of these sizes, whatever the names of its axes; None if nothing was."""
    found = load_machine(_about(mesh, hosts))
    return None if found is None else _with_axes(found, {str(n): name for n, name in enumerate(mesh.names)})


def _save(mesh: Mesh, hosts: tuple[int, ...], machine: Machine, like: Machine) -> None:
    """Save the machine of a mesh, and one with the constants of its ranks."""
    save_machine(_about(mesh, hosts), _with_axes(machine, {name: str(n) for n, name in enumerate(mesh.names)}))
    save_machine(_about_ranks(mesh, hosts), like)


def _with_ranks(machine: Machine, like: Machine, origin: str) -> Machine:
    """A machine whose ranks, but not their links, are like those of another one."""
    return attrs.evolve(machine, **{name: getattr(like, name) for name in _OF_RANKS}, origin=origin)


def _with_axes(machine: Machine, names: Mapping[str, str]) -> Machine:
    """A machine with other names of the axes."""
    return attrs.evolve(
        machine,
        links=[attrs.evolve(link, axis=names[link.axis]) for link in machine.links],
        axis_bandwidth={names[axis]: rate for axis, rate in machine.axis_bandwidth},
        axis_latency={names[axis]: seconds for axis, seconds in machine.axis_latency},
    )


def _preset(mesh: Mesh, hosts: tuple[int, ...]) -> Machine | None:
    """The preset of the mesh's GPUs, with a network's constants for axes across hosts; None if they have none."""
    if mesh.device.type != "cuda":
        return None
    name = device_name(mesh)
    preset = next((preset for part, preset in _GPUS if part in name), None)
    if preset is None:
        return None
    far = [axis for axis in mesh.names if hosts_along(mesh, axis, hosts) > 1]
    changes: dict[str, Any] = {f"axis_{constant}": dict.fromkeys(far, value) for constant, value in NETWORK.items()}
    across = f", {', '.join(far)} across hosts" if far else ""
    return Machine.preset(preset, **changes, origin=f"preset {preset}{across}")


def _about(mesh: Mesh, hosts: tuple[int, ...]) -> dict[str, Any]:
    """What measured constants depend on, as plain data."""
    return {
        "format": FORMAT,
        "device": device_name(mesh),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "backend": backend(mesh),
        "hosts": list(hosts),
        "mesh": list(mesh.sizes),
        "torch": torch.__version__,
    }


def _about_ranks(mesh: Mesh, hosts: tuple[int, ...]) -> dict[str, Any]:
    """What the measured constants of ranks depend on."""
    return {name: value for name, value in _about(mesh, hosts).items() if name != "mesh"}
