"""The product of lowering: for each rank an `fx.GraphModule` over local tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import torch.fx as fx

from spmd.collectives.primitives import COLLECTIVES
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.single_threaded import single_threaded
from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Source
from spmd.ir.printing import program_text


@attrs.frozen
class LocalCollective:
    """One collective of a local program.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute.
        axes: the mesh axes that it spans.
        bytes: sent by the rank that sends most, as in `spmd.plan.data.comm.Comm`.
        cause: the value's producer and consumer with the specs that they produce and require; for a collective in a
            local implementation, its operator.
        source: the user's line; None if it is not known.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    cause: str
    source: Source | None

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.cause}{where}; {self.kind} over {', '.join(self.axes)}, {self.bytes:,.0f} bytes"


@attrs.frozen(eq=False, repr=False)
class LocalProgram:
    """What each rank runs: plain torch operators on local tensors and collectives with mesh axis names.

    Args:
        name: the name of the user's function.
        mesh: the mesh.
        input_specs, output_specs: the specs of the flattened arguments and results.
        uneven: the specs whose local shapes differ between ranks; ranks with the same shapes share a program.
        build: builds the program of the rank at a coordinate.
    """

    name: str
    mesh: Mesh
    input_specs: tuple[DTensorSpec, ...]
    output_specs: tuple[DTensorSpec, ...]
    uneven: tuple[DTensorSpec, ...]
    build: Callable[[Coordinate], fx.GraphModule]
    _modules: dict[Any, fx.GraphModule] = attrs.field(factory=dict, init=False)

    def graph_module(self, coordinate: Coordinate | None = None) -> fx.GraphModule:
        """The program of the rank at `coordinate` (zero by default); ranks with equal local shapes share one object."""
        coordinate = coordinate or (0,) * len(self.mesh.names)
        key = tuple(spec.local_shape(coordinate) for spec in self.uneven)
        if key not in self._modules:
            with single_threaded():
                self._modules[key] = self.build(coordinate)
        return self._modules[key]

    @property
    def collectives(self) -> tuple[LocalCollective, ...]:
        """Every collective of the rank at coordinate zero, in order of execution."""
        nodes = self.graph_module().graph.nodes
        return tuple(_collective(node) for node in nodes if is_collective(node))

    def as_text(self) -> str:
        """The program as readable Python.

        Each value is annotated with its dtype, local shape and spec; each collective with its cause, the user's line
        and the bytes sent by the rank that sends most. If shards are uneven, this is the program of coordinate zero.
        """
        ranks = "of coordinate zero; shapes differ between ranks" if self.uneven else "of every rank"
        header = [f"{self.mesh}: the program {ranks}"]
        remark = lambda node: str(_collective(node)) if is_collective(node) else None  # noqa: E731
        return program_text(self.name, self.graph_module().graph, header, remark)

    __str__ = as_text

    def __repr__(self) -> str:
        return f"LocalProgram({self.name} on {self.mesh}, {len(self.collectives)} collectives)"

    def count(self) -> dict[str, int]:
        """The number of collectives of each kind, by kind."""
        return dict(Counter(collective.kind for collective in self.collectives))


def _collective(node: fx.Node) -> LocalCollective:
    kind, axes = COLLECTIVES[node.target].value, tuple(node.args[-1])  # type: ignore[index, arg-type]
    return LocalCollective(kind, axes, node.meta["bytes"], node.meta["cause"], node.meta["source"])


def is_collective(node: fx.Node) -> bool:
    """Whether a node calls a collective."""
    return node.op == "call_function" and node.target in COLLECTIVES


def is_primitive(node: fx.Node) -> bool:
    """Whether a node calls a primitive of `spmd.collectives`: a collective or a local operator in namespace `spmd`."""
    return node.op == "call_function" and getattr(node.target, "namespace", None) == "spmd"
