"""The product of lowering: for each rank a program over local tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
from torch.fx import GraphModule

from spmd.core.mesh import Coordinate, Mesh
from spmd.core.single_threaded import single_threaded
from spmd.core.spec import DTensorSpec
from spmd.ir.comm import Comm
from spmd.ir.effects import Effect
from spmd.ir.graph import Graph, Operation
from spmd.ir.launch_schedule import LaunchSchedule
from spmd.ir.printing import program_text
from spmd.ir.program_html import program_html
from spmd.ir.regions import STRUCTURE
from spmd.lowering.device import on_device
from spmd.lowering.fx_module import fx_module


@attrs.frozen(eq=False, repr=False)
class LocalProgram:
    """What each rank runs: plain torch operators on local tensors and collectives with mesh axis names.

    Args:
        name: the name of the user's function.
        mesh: the mesh.
        input_specs, output_specs: the specs of the flattened arguments and results.
        uneven: the specs whose local shapes differ between ranks; ranks with the same shapes share a program.
        build: builds the program of the rank at a coordinate.
        schedule: as in `PlanData`.
    """

    name: str
    mesh: Mesh
    input_specs: tuple[DTensorSpec, ...]
    output_specs: tuple[DTensorSpec, ...]
    uneven: tuple[DTensorSpec, ...]
    build: Callable[[Coordinate], Graph]
    schedule: LaunchSchedule | None
    _graphs: dict[Any, Graph] = attrs.field(factory=dict, init=False)

    def graph(self, coordinate: Coordinate | None = None) -> Graph:
        """The program of the rank at `coordinate` (zero by default); ranks with equal local shapes share one object."""
        coordinate = coordinate or (0,) * len(self.mesh.names)
        key = tuple(spec.local_shape(coordinate) for spec in self.uneven)
        if key not in self._graphs:
            with single_threaded():
                if key not in self._graphs:
                    self._graphs[key] = on_device(self.build(coordinate), self.mesh.device)
        return self._graphs[key]

    def graph_module(self, coordinate: Coordinate | None = None) -> GraphModule:
        """The program of the rank at `coordinate` (zero by default) as a new `torch.fx.GraphModule`.

        It takes and returns local tensors. Collectives are calls of the primitives, `torch.ops.spmd`, which only a
        runtime can run.
        """
        return fx_module(self.graph(coordinate), self.name)

    @property
    def collectives(self) -> tuple[Comm, ...]:
        """Every collective of the rank at coordinate zero, in order of execution."""
        comms = (operation.annotations.comm for operation in self.graph().operations)
        return tuple(comm for comm in comms if comm is not None)

    def as_text(self, fold: bool = True) -> str:
        """The program as readable Python.

        Each value is annotated with its dtype, local shape and spec; each collective with its cause, the user's line
        and the bytes sent by the rank that sends most. If shards are uneven, this is the program of coordinate zero.

        Args:
            fold: whether lines that repeat, as those of equal layers, are printed once, in a `for`.
        """
        ranks = "of coordinate zero; shapes differ between ranks" if self.uneven else "of every rank"
        header = [f"{self.mesh}: the program {ranks}"]
        return program_text(self.name, self.graph(), header, fold)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        count = len(self.collectives)
        return f"LocalProgram({self.name} on {self.mesh}, {count} collective{'s' * (count != 1)})"

    def _repr_html_(self) -> str:
        return program_html(repr(self), self.as_text())

    def count(self) -> dict[str, int]:
        """The number of collectives of each kind, by kind."""
        return dict(Counter(collective.kind for collective in self.collectives))


def is_collective(operation: Operation) -> bool:
    """Whether an operation calls a collective."""
    return operation.effect is Effect.COLLECTIVE


def is_primitive(operation: Operation) -> bool:
    """Whether an operation calls a primitive of `spmd.collectives`: a collective or a local operator in `spmd`."""
    return getattr(operation.op, "namespace", None) == "spmd" and operation.op not in STRUCTURE
