"""One flat program on a mesh: the stages of its compilation, each computed at its first use, and its execution."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from spmd.api.programs.options import Options
from spmd.api.programs.progress import stage
from spmd.api.values.communication import is_watched, record_comms
from spmd.api.values.dtensor import DTensor, wrap
from spmd.api.values.wrapper import Shards
from spmd.collectives.distributed.agreement import failing_together
from spmd.core.compile_lock import COMPILING, compiled_property
from spmd.core.mesh import Mesh, Runtime
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import MeshError
from spmd.lowering.program import LocalProgram
from spmd.runtime import DistributedProgram, VirtualProgram
from spmd.runtime.agreement import first_run
from spmd.runtime.torch_settings import isolated
from spmd.tracing.traced import Traced

if TYPE_CHECKING:
    from spmd.inspect.plan import Plan


class StandIn:
    """A stand-in for a tensor in tracing, without keeping it alive; it is on the mesh's device."""

    __slots__ = ("device", "dtype", "shape", "strides")

    def __init__(self, meta: TensorMeta, device: torch.device, strides: tuple[int, ...] | None = None) -> None:
        self.shape, self.dtype, self.device, self.strides = meta.shape, meta.dtype, device, strides


class Program:
    """A traced function on a mesh, with the specs of its inputs and outputs.

    Args:
        traced: the function.
        mesh: the mesh.
        in_specs: the spec of every input.
        given_out_specs: the spec of every output; None for one that the planner chooses.
        donated: the positions of the donated inputs.
        options: those of `jit`.
    """

    def __init__(
        self,
        traced: Traced,
        mesh: Mesh,
        in_specs: tuple[DTensorSpec, ...],
        given_out_specs: tuple[DTensorSpec | None, ...],
        donated: frozenset[int],
        options: Options,
    ) -> None:
        self.traced, self.mesh, self.options = traced, mesh, options
        self.in_specs, self.given_out_specs, self.donated = in_specs, given_out_specs, donated
        self._executable: DistributedProgram | VirtualProgram | None = None

    @compiled_property
    def plan(self) -> Plan:
        """The plan: a spec for every value, and the collectives.

        Raises:
            PlanError: no plan fits in the memory limit, the plan sends more than `comms` allows, or a given plan was
                made for another program, mesh or specs.
        """
        from spmd.api.programs.stages import make_plan  # at the first plan, not by `import spmd`

        with isolated(), stage(self.traced.name, "planning"):
            return make_plan(self.traced, self.mesh, self.in_specs, self.given_out_specs, self.donated, self.options)

    @compiled_property
    def local(self) -> LocalProgram:
        """The lowered program that each rank runs."""
        from spmd.api.programs.stages import make_program

        plan = self.plan
        with isolated(), stage(self.traced.name, "lowering"):
            return make_program(plan, self.traced.name)

    @compiled_property
    def out_specs(self) -> tuple[DTensorSpec, ...]:
        """The spec of every output; one equal to an input's is the same object, which a later call compares faster."""
        specs = (given or chosen for given, chosen in zip(self.given_out_specs, self.local.output_specs, strict=True))
        known = {spec: spec for spec in self.in_specs}
        return tuple(known.setdefault(spec, spec) for spec in specs)

    def lower(self) -> LocalProgram:
        """Lower the program, unless it is lowered."""
        return self.local

    def compile(self) -> DistributedProgram | VirtualProgram:
        """Compile the program for the mesh's runtime, unless it is compiled; on a distributed mesh a collective call.

        Raises:
            DivergenceError: the ranks of a distributed mesh have different programs.
        """
        if self._executable is None:
            program, distributed = self.local, self.mesh.runtime is Runtime.DISTRIBUTED
            # Not under the lock on processes: the ranks wait for each other.
            lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if distributed else COMPILING
            with isolated(), lock:
                self._executable = (DistributedProgram if distributed else VirtualProgram)(program)
        return self._executable

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled for the runtime."""
        return self._executable is not None

    def prepare(self) -> None:
        """Compile it for the runtime; on a distributed mesh the first time is a collective call.

        Ranks compare programs once. An error on one rank before they compare anything is raised on all ranks.

        Raises:
            DivergenceError: the ranks have different programs.
            MeshError: an abstract mesh, on which nothing can run.
        """
        if not self.is_ready:
            with failing_together(first_run(self.mesh), self.mesh):
                self.check_runs()
            self.compile()

    def check_runs(self) -> None:
        """Lower the program, without communication; MeshError on an abstract mesh."""
        if self.mesh.runtime is Runtime.ABSTRACT:
            raise MeshError(
                f"{self.mesh} is abstract: a function can be planned and lowered for it, not run. "
                "Use make_mesh(..., runtime='virtual')."
            )
        self.lower()

    def __call__(self, shards: list[Shards], numbers: Sequence[float] = ()) -> list[DTensor]:
        """Run the program.

        Args:
            shards: the shards of all inputs; the list is emptied.
            numbers: the dynamic numbers of the call.

        Returns:
            The outputs.
        """
        self.prepare()
        if is_watched():
            record_comms(self.local.collectives, self.traced.name, self.plan.suspicious_moves)
        return list(map(wrap, self.out_specs, self.compile()(shards, numbers)))
