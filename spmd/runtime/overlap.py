"""A rank's graph for torch.distributed: collectives started early and waited for late.

Every primitive becomes two calls, which start the collective and finish it. A start moves up to where its operand is
there, but not above the first use of the collective before, so that at most two are under way: a program that gathers
parameters for use must not gather all of them at once. It never passes another start: ranks whose graphs differ (in
views that change nothing on some of them) still communicate in one order. A finish moves down to the first use.
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
    """The program of the rank at `coordinate` on a distributed mesh, from its lowered graph; a new module."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    sink_views(graph)
    for node in graph.nodes:
        if is_primitive(node):
            _bind(node, mesh, coordinate)
    return _LazyGraphModule(module, split_exchanges(graph), "RankProgram")


def sink_views(graph: fx.Graph) -> None:
    """Reshape what a collective gives where it is used, and not before: to look at it is to wait for it."""
    for node in reversed(list(graph.nodes)):
        if node.target is RESHAPE and node.users and _is_result(node.args[0]):
            min(node.users).prepend(node)


def _is_result(node: fx.Node) -> bool:
    """Whether a node is what a collective gives, or a reshape of it."""
    while node.target is RESHAPE:
        node = node.args[0]  # type: ignore[assignment]
    return is_primitive(node)


def _bind(node: fx.Node, mesh: Mesh, coordinate: Coordinate) -> None:
    """Make a call of a primitive one of what this rank does for it."""
    operands = node.all_input_nodes
    meta: TensorMeta | None = operands[0].meta["val"] if operands else None
    arguments, source = tuple(node.args[len(operands) :]), node.meta.get("source")
    cause = f"{node.meta.get('cause', '')}{f' at {source}' if source else ''}"
    node.target = bind(node.target, mesh, coordinate, meta, arguments, cause)  # type: ignore[arg-type, assignment]
    node.args = tuple(operands)


@attrs.frozen
class _Window:
    """Where a collective is under way: positions of nodes before which its start and its finish go."""

    start: int
    finish: int


def split_exchanges(graph: fx.Graph) -> fx.Graph:
    """A graph in which every exchange is a start and, later, a finish."""
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
            if isinstance(exchange.args[0].target, Exchange):  # what it sends may be what another one brings
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
    """The graph being written, and what stands in it for each node of the old one."""

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
