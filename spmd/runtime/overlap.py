"""A rank's graph for torch.distributed: collectives overlap with computation.

Every collective becomes two calls: one starts it, one waits for its result (finish). A start moves up to just after the
operator that computes its operand, but not above the first use of the previous collective's result. So at most two are
in flight, which bounds memory: a program that all-gathers parameters must not gather all of them at once. A start never
passes another start, so that ranks whose graphs differ (in views that are identities on some ranks) communicate in the
same order. A finish moves down to the first use of the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import attrs
import torch
import torch.fx as fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from spmd.collectives.distributed.exchange import Exchange, bind
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.spec import TensorMeta
from spmd.lowering.program import is_primitive

RESHAPE = torch.ops.aten.reshape.default


def overlap(module: fx.GraphModule, mesh: Mesh, coordinate: Coordinate) -> fx.GraphModule:
    """Split the collectives of a lowered program into starts and finishes.

    Args:
        module: the lowered program of the rank, which is not changed.
        mesh: a distributed mesh.
        coordinate: the mesh coordinate of this process's rank.

    Returns:
        A new module, in which every primitive is bound to what this rank does for it.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    sink_views(graph)
    for node in graph.nodes:
        if is_primitive(node):
            _bind(node, mesh, coordinate)
    return _LazyGraphModule(module, split_exchanges(graph), "RankProgram")


def sink_views(graph: fx.Graph) -> None:
    """Move reshapes of a primitive's result down to their first use, because a reshape waits for the collective."""
    for node in reversed(list(graph.nodes)):
        if node.target is RESHAPE and node.users and _is_result(node.args[0]):
            min(node.users).prepend(node)


def _is_result(node: fx.Node) -> bool:
    """Whether a node is the result of a primitive, or a reshape of it."""
    while node.target is RESHAPE:
        node = node.args[0]  # type: ignore[assignment]
    return is_primitive(node)


def _bind(node: fx.Node, mesh: Mesh, coordinate: Coordinate) -> None:
    """Replace a primitive by this rank's implementation of it, with all arguments but the operand bound."""
    operands = node.all_input_nodes
    meta: TensorMeta | None = operands[0].meta["val"] if operands else None
    arguments, source = tuple(node.args[len(operands) :]), node.meta.get("source")
    cause = f"{node.meta.get('cause', '')}{f' at {source}' if source else ''}"
    node.target = bind(node.target, mesh, coordinate, meta, arguments, cause)  # type: ignore[arg-type, assignment]
    node.args = tuple(operands)


@attrs.frozen
class _Window:
    """Where a collective is in flight: positions of the nodes before which its start and its finish are inserted."""

    start: int
    finish: int


def split_exchanges(graph: fx.Graph) -> fx.Graph:
    """A new graph in which every call of an `Exchange` is split into a start and, later, a finish."""
    nodes = list(graph.nodes)
    exchanges = [node for node in nodes if isinstance(node.target, Exchange)]
    starts, finishes = defaultdict(list), defaultdict(list)
    for node, window in zip(exchanges, _windows(nodes, exchanges), strict=True):
        starts[window.start].append(node)
        finishes[window.finish].append(node)
    writer = _Writer()
    for position, node in enumerate(nodes):
        waiting = finishes[position]
        for exchange in starts[position]:
            if isinstance(exchange.args[0].target, Exchange):  # the operand may be the result of a pending one
                writer.finish(waiting)
            writer.start(exchange)
        writer.finish(waiting)
        if not isinstance(node.target, Exchange):
            writer.copy(node)
    writer.graph.lint()
    return writer.graph


def _windows(nodes: Sequence[fx.Node], exchanges: Sequence[fx.Node]) -> list[_Window]:
    position = {node: index for index, node in enumerate(nodes)}
    windows: list[_Window] = []
    for node in exchanges:
        operand, here = node.all_input_nodes[0], position[node]
        start = here
        if not isinstance(operand.target, Exchange):
            start = position[operand] + 1
            if windows:
                start = max(start, windows[-1].start, min(here, windows[-1].finish))
        windows.append(_Window(start, min((position[user] for user in node.users), default=len(nodes) - 1)))
    return windows


class _Writer:
    """The graph under construction, and its node for each node of the old graph."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._written: dict[fx.Node, fx.Node] = {}
        self._pending: dict[fx.Node, fx.Node] = {}

    def copy(self, node: fx.Node) -> None:
        self._written[node] = self.graph.node_copy(node, self._written.__getitem__)

    def start(self, node: fx.Node) -> None:
        exchange: Exchange = node.target  # type: ignore[assignment]
        operand = self._written[node.all_input_nodes[0]]
        pending = self.graph.create_node("call_function", exchange.start, (operand,), name=f"{node.name}_start")
        pending.meta = {key: value for key, value in node.meta.items() if key != "spec"}
        self._pending[node] = pending

    def finish(self, waiting: list[fx.Node]) -> None:
        for node in waiting:
            exchange: Exchange = node.target  # type: ignore[assignment]
            arguments = (self._pending.pop(node),)
            self._written[node] = self.graph.create_node("call_function", exchange.finish, arguments, name=node.name)
            self._written[node].meta = dict(node.meta)
        waiting.clear()
