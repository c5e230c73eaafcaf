"""A traced function: its program, and how arguments and results are flattened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import optree

from spmd.core.folded_lines import fold_lines
from spmd.core.pytree import tree_flatten
from spmd.ir.graph import Graph
from spmd.ir.number import Number
from spmd.ir.program_html import program_html
from spmd.tracing.numbers import Guards


@attrs.frozen(eq=False)
class Traced:
    """A traced function.

    Args:
        graph: the program over flat inputs and outputs.
        in_tree: optree's treespec of the tuple of dynamic arguments.
        out_tree: optree's treespec of the result.
        input_paths: the path of each input in the arguments, for messages: `0['w']`.
        output_paths: the path of each output in the result, for messages: `[1]['loss']`; empty for a bare tensor.
        name: the function's name.
        guards: what the program takes for granted of the dynamic numbers of a call; planning may add to them.
        values: for each leaf of the result that is no tensor, its position and the number or constant that it is.
    """

    graph: Graph
    in_tree: optree.PyTreeSpec
    out_tree: optree.PyTreeSpec
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    name: str
    guards: Guards = attrs.field(factory=Guards)
    values: tuple[tuple[int, Any], ...] = ()

    @classmethod
    def flat(cls, graph: Graph, name: str) -> Traced:
        """A program from tensors to tensors as the trace of a function."""
        inputs, outputs = (tree_flatten(tuple(values))[1] for values in (graph.inputs, graph.outputs))
        sources, results = (tuple(map(str, range(tree.num_leaves))) for tree in (inputs, outputs))
        return cls(graph, inputs, outputs, sources, results, name)

    def result(self, tensors: Iterable[Any], numbers: Sequence[float] = ()) -> Any:
        """The result of the function, from its tensors and the dynamic numbers of the call."""
        if not self.values:
            return self.out_tree.unflatten(tensors)
        leaves = list(tensors)
        for position, value in self.values:
            leaves.insert(position, value.evaluate(numbers) if isinstance(value, Number) else value)
        return self.out_tree.unflatten(leaves)

    @property
    def _text(self) -> str:
        return "\n".join(fold_lines(str(self.graph).splitlines()))

    def __str__(self) -> str:
        return f"{self.name}\n{self._text}"

    def _repr_html_(self) -> str:
        operations = len(self.graph.operations)
        return program_html(f"{self.name}: {operations} operators on global tensors", self._text)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in programs and messages."""
    return str(getattr(function, "__name__", type(function).__name__))


def dynamic_paths(tree: optree.PyTreeSpec, labels: Sequence[object]) -> list[str]:
    """The path of each leaf of the dynamic arguments, which have these positions or names."""
    return [f"{labels[accessor[0].entry]}{accessor[1:].codify('')}" for accessor in tree.accessors()]
