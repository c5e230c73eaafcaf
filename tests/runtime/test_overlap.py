"""Where the distributed runtime starts and finishes collectives, seen in what happens when."""

from __future__ import annotations

import torch
import torch.fx as fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from spmd.collectives.distributed.exchange import Exchange
from spmd.runtime.codegen import generate
from spmd.runtime.overlap import split_exchanges


class Story:
    """A graph of values that are numbers, and what happens as it runs."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.events: list[str] = []
        self._finished: list[str] = []

    def input(self) -> fx.Node:
        return self.graph.placeholder(f"x{len(self.graph.nodes)}")

    def use(self, name: str, *operands: fx.Node) -> fx.Node:
        def run(*values: int) -> int:
            self.events.append(name)
            return sum(values) + 1

        return self.graph.call_function(run, operands)

    def collective(self, name: str, operand: fx.Node) -> fx.Node:
        story = self

        class Told(Exchange):
            def start(self, x):
                story.events.append(f"start {name}")
                return x

            def finish(self, pending):
                story.events.append(f"finish {name}")
                return pending * 10

        exchange = Told(torch.ops._c10d_functional.all_reduce.default, (), lambda x: x, lambda x: x)
        return self.graph.create_node("call_function", exchange, (operand,), name="exchange")

    def run(self, *results: fx.Node, inputs: list[int]) -> tuple[int, ...]:
        self.graph.output(tuple(results))
        module = _LazyGraphModule({}, split_exchanges(self.graph))
        return generate(module, lockstep=False).function(inputs)


def test_a_collective_is_under_way_while_its_result_is_not_wanted():
    story = Story()
    x = story.input()
    a = story.use("a", x)
    gathered = story.collective("g", x)
    b = story.use("b", a)
    c = story.use("c", b, gathered)
    assert (47,) == story.run(c, inputs=[4])
    assert ["start g", "a", "b", "finish g", "c"] == story.events


def test_parameters_are_gathered_one_layer_ahead():
    story = Story()
    weights = [story.input() for _ in range(4)]
    value = weights[0]
    for number, weight in enumerate(weights):
        value = story.use(f"layer {number}", story.collective(str(number), weight), value)
    story.run(value, inputs=[1, 2, 3, 4])
    assert story.events == [
        "start 0", "start 1", "finish 0", "layer 0", "start 2", "finish 1", "layer 1",
        "start 3", "finish 2", "layer 2", "finish 3", "layer 3",
    ]  # fmt: skip


def test_what_one_collective_gives_another_sends():
    story = Story()
    x, y = story.input(), story.input()
    first = story.collective("1", x)
    second = story.collective("2", first)
    third = story.collective("3", y)
    assert (101, 20) == story.run(story.use("u", second), third, inputs=[1, 2])
    assert ["start 1", "finish 1", "start 2", "start 3", "finish 2", "u", "finish 3"] == story.events


def test_starts_keep_their_order_whatever_is_ready():
    story = Story()
    x = story.input()
    late = story.collective("late", story.use("a", x))
    early = story.collective("early", x)
    story.run(story.use("u", early, late), inputs=[1])
    assert ["a", "start late", "start early", "finish late", "finish early", "u"] == story.events


def test_what_nobody_wants_is_finished_too():
    story = Story()
    x = story.input()
    story.collective("g", x)
    assert (2,) == story.run(story.use("a", x), inputs=[1])
    assert ["start g", "a", "finish g"] == story.events
