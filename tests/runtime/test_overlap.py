"""Where the distributed runtime starts and finishes collectives, seen in what happens when."""

from __future__ import annotations

import pytest
import torch

from spmd.collectives.transport.exchange import Exchange
from spmd.core.spec import TensorMeta
from spmd.ir.comm import Comm
from spmd.ir.graph import Annotations, Graph, Operation, Value
from spmd.lowering.launches import split_launches
from spmd.runtime.codegen import generate
from spmd.runtime.communication import bound


class Story:
    """A program of values that are numbers, and what happens as it runs."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.operations: list[Operation] = []
        self.events: list[str] = []

    def value(self, name: str) -> Value:
        return Value(name, TensorMeta((), torch.float32))

    def input(self) -> Value:
        self.inputs.append(self.value(f"x{len(self.inputs)}"))
        return self.inputs[-1]

    def use(self, name: str, *operands: Value) -> Value:
        def run(*values: int) -> int:
            self.events.append(name)
            return sum(values) + 1

        return self.call(run, operands)

    def call(self, op: object, operands: tuple[Value, ...], comm: Comm | None = None) -> Value:
        result = self.value(f"v{len(self.operations)}")
        self.operations.append(Operation(op, operands, {}, (result,), annotations=Annotations(comm)))
        return result

    def collective(self, name: str, operand: Value, bytes: float = 1.0) -> Value:
        story = self
        launch = sum(operation.annotations.comm is not None for operation in self.operations)

        class Told(Exchange):
            def start(self, x):
                story.events.append(f"start {name}")
                return x

            def finish(self, pending):
                story.events.append(f"finish {name}")
                return pending * 10

        told = Told(
            torch.ops._c10d_functional.all_reduce.default, (), lambda x: x, lambda x: x, sends=(1,), receives=(1,)
        )
        return self.call(told, (operand,), Comm("all_reduce", ("x",), bytes, 0.0, "", None, launch))

    def run(self, *results: Value, inputs: list[int], window: float = 1.0) -> tuple[int, ...]:
        graph = Graph(tuple(self.inputs), (), tuple(self.operations), results)
        return generate(bound(split_launches(graph, window), lambda operation: operation.op)).function(inputs)


def test_a_collective_is_under_way_while_its_result_is_not_wanted():
    story = Story()
    x = story.input()
    a = story.use("a", x)
    gathered = story.collective("g", x)
    b = story.use("b", a)
    c = story.use("c", b, gathered)
    assert (47,) == story.run(c, inputs=[4])
    assert ["start g", "a", "b", "finish g", "c"] == story.events


def layers(window: float) -> list[str]:
    """The events of four layers whose weights of one byte are gathered."""
    story = Story()
    weights = [story.input() for _ in range(4)]
    value = weights[0]
    for number, weight in enumerate(weights):
        value = story.use(f"layer {number}", story.collective(str(number), weight), value)
    story.run(value, inputs=[1, 2, 3, 4], window=window)
    return story.events


@pytest.mark.parametrize("window", [0.5, 1.0])
def test_parameters_are_gathered_one_layer_ahead(window: float):
    """Also if the window has no room for them."""
    assert layers(window) == [
        "start 0", "start 1", "finish 0", "layer 0", "start 2", "finish 1", "layer 1",
        "start 3", "finish 2", "layer 2", "finish 3", "layer 3",
    ]  # fmt: skip


def test_a_window_of_two_weights_gathers_two_layers_ahead():
    assert layers(2.0) == [
        "start 0", "start 1", "start 2", "finish 0", "layer 0", "start 3", "finish 1", "layer 1",
        "finish 2", "layer 2", "finish 3", "layer 3",
    ]  # fmt: skip


def test_without_a_window_every_launch_starts_at_its_place():
    assert layers(0.0) == [event for n in range(4) for event in (f"start {n}", f"finish {n}", f"layer {n}")]


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
    assert ["a", "start late", "start early", "finish early", "finish late", "u"] == story.events


def test_what_nobody_wants_is_finished_too():
    story = Story()
    x = story.input()
    story.collective("g", x)
    assert (2,) == story.run(story.use("a", x), inputs=[1])
    assert ["start g", "a", "finish g"] == story.events
