"""Layers of plans: the repeated stretches of a program are found, and equal layers lie identically."""

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gpt
import layouts
import spmd
from spmd import P
from spmd.core.quantity import size_text, time_text
from spmd.core.spec import TensorMeta
from spmd.inspect import Plan
from spmd.ir.graph import Graph, Operation, Value
from spmd.plan.cost.account import account
from spmd.plan.search.repeats import find_repeats
from spmd.rules import RULES, find_rule
from spmd.tracing.canonicalize.canonicalize import canonicalize
from spmd.tracing.trace import trace
from workloads import GptStep

Function = Callable[[list[Tensor], Tensor], object]

MESH = spmd.make_mesh({"data": 4}, runtime="abstract")


def relu_layers(weights: list[Tensor], x: Tensor) -> Tensor:
    for weight in weights:
        x = torch.relu(x @ weight)
    return x


def residual_layers(weights: list[Tensor], x: Tensor) -> Tensor:
    for weight in weights:
        x = x + torch.relu(x @ weight).sin()
    return x


def gradient(function: Callable[[list[Tensor], Tensor], Tensor]) -> Function:
    def step(weights: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
        return torch.func.grad(lambda weights, x: function(weights, x).square().sum(), argnums=(0, 1))(weights, x)

    return step


def program(function: Function, widths: Sequence[int], rows: int = 32) -> Graph:
    """The canonical program of layers from each width to the next."""
    weights = [TensorMeta(pair, torch.float32) for pair in itertools.pairwise(widths)]
    graph = trace(function, (weights, TensorMeta((rows, widths[0]), torch.float32))).graph
    return canonicalize(graph, lambda op: find_rule(op, RULES) is None)


def shapes(graph: Graph) -> list[tuple[int, int]]:
    """How many copies each repeat has, and of how many operations."""
    return [(len(repeat.copies), len(repeat.copies[0])) for repeat in find_repeats(graph)]


@functools.lru_cache
def gpt_plan(strategy: str, layers: int) -> Plan:
    return GptStep(gpt.Config(layers=layers), strategy, batch=16).plan()


LAST = -1
OTHERWISE: dict[str, tuple[set[int], set[int]]] = {
    "dp": (set(), set()),
    "fsdp": ({0}, set()),  # what the embedding makes is moved otherwise than the residual stream
    "tp": ({0}, set()),
    "dp_tp": (set(), set()),
    "fsdp_tp": ({0}, set()),
    "sp": ({0}, {0, LAST}),  # the embedding and the head lie otherwise than the residual stream is constrained to
}
"""Which forward and backward layers may lie otherwise than all others."""


@pytest.mark.parametrize(
    ("strategy", "layers"),
    [
        pytest.param(name, layers, marks=() if layers == 6 and name in ("fsdp", "sp") else pytest.mark.slow)
        for name in layouts.STRATEGIES
        for layers in (6, 12)
    ],
)
def test_inner_layers_of_the_gpt_lie_identically(strategy: str, layers: int) -> None:
    plan = gpt_plan(strategy, layers)
    constraints = 2 if strategy == "sp" else 0
    assert [(layers, 42 + constraints), (layers, 61 + constraints)] == shapes(plan.request.graph)
    for stretch, others in zip(plan.layers, OTHERWISE[strategy], strict=True):
        inner = set(range(layers)) - {number % layers for number in others}
        assert any(inner <= set(alike.layers) for alike in stretch.alike), stretch
        assert sorted(range(layers)) == sorted(number for alike in stretch.alike for number in alike.layers)


def test_layers_know_their_lines_and_their_forward() -> None:
    forward, backward = gpt_plan("fsdp", 6).layers
    assert ("gpt.py:84-115", "gpt.py:84-111 (backward)") == (forward.place, backward.place)
    assert ((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0)) == (forward.numbers, backward.numbers)
    for layers, number in itertools.product((forward, backward), range(6)):
        copy = layers.copies[layers.numbers.index(number)]
        weights = {v.name for o in copy for v in o.operands if v.name.startswith("state_params_blocks")}
        assert weights
        assert all(name.startswith(f"state_params_blocks_{number}_") for name in weights)


@pytest.mark.parametrize("count", [2, 3, 9])
def test_equal_layers_are_found_forward_and_backward(count: int) -> None:
    widths = [16] * (count + 1)
    assert [(count, 2)] == shapes(program(relu_layers, widths))
    assert [(count, 4)] == shapes(program(residual_layers, widths))
    assert [(count, 2), (count, 5)] == shapes(program(gradient(relu_layers), widths))
    assert [(count, 4), (count, 8)] == shapes(program(gradient(residual_layers), widths))


def test_layers_that_differ_are_no_repeat() -> None:
    assert [] == shapes(program(relu_layers, [16, 24, 16, 32]))
    assert [] == shapes(program(gradient(relu_layers), [16, 24, 8, 32]))
    assert [(2, 4)] == shapes(program(relu_layers, [16, 24, 16, 24, 16]))  # two layers at a time
    assert [(3, 2), (3, 2)] == shapes(program(relu_layers, [16, 16, 16, 16, 24, 24, 24, 24]))


def test_programs_without_layers_have_none() -> None:
    assert [] == shapes(program(lambda w, x: torch.relu(x @ w[0]), [16, 16]))
    assert [] == shapes(program(lambda w, x: x, [16, 16]))
    assert [] == shapes(program(lambda w, x: x.sin().sin().sin().sin(), [16, 16]))  # nothing to multiply
    assert [] == shapes(program(lambda w, x: [torch.relu(x @ each) for each in w], [16] * 5))  # side by side
    assert [] == shapes(program(lambda w, x: [each * 2 - each.sin() for each in w], [16] * 5))
    assert () == spmd.jit(lambda x: x, P("data"), P("data"), mesh=MESH).plan(torch.empty(4)).layers


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_literal_tells_layers_apart(place: str) -> None:
    def scaled(weights: list[Tensor], x: Tensor) -> Tensor:
        for number, weight in enumerate(weights):
            scale = 0.5 if number < 4 else 0.25
            x = x * scale if place == "first" else x
            x = x @ weight
            x = x * scale if place == "middle" else x
            x = torch.relu(x)
            x = x * scale if place == "last" else x
        return x

    graph = program(scaled, [16] * 9)
    repeats = find_repeats(graph)
    assert [(4, 3), (4, 3)] == shapes(graph)
    for repeat, scale in zip(repeats, (0.5, 0.25), strict=True):
        assert {scale} == {o.args[1] for copy in repeat.copies for o in copy if o.name == "mul"}
    assert set(graph.operations) == {o for repeat in repeats for copy in repeat.copies for o in copy}


def test_the_wiring_tells_layers_apart() -> None:
    def layers(weights: list[Tensor], x: Tensor) -> Tensor:
        for number, weight in enumerate(weights):
            y = x @ weight
            z = y.sin()
            x = (y if number < 4 else x) + z
        return x

    graph = program(layers, [16] * 9)
    first, second = find_repeats(graph)
    assert [(4, 3), (4, 3)] == shapes(graph)
    assert first.copies[-1][-1].operands[0] is first.copies[-1][0].tensors[0]
    assert second.copies[0][-1].operands[0] is first.copies[-1][-1].tensors[0]


def test_what_layers_share_is_in_none_of_them() -> None:
    def masked(weights: list[Tensor], x: Tensor) -> Tensor:
        for weight in weights:
            x = torch.softmax(x @ weight + torch.full((16, 16), -torch.inf).triu(1), -1)
        return x

    graph = program(masked, [16] * 4, rows=16)
    (repeat,) = find_repeats(graph)
    assert (3, ["mm", "add", "_softmax"]) == (len(repeat.copies), [operation.name for operation in repeat.copies[0]])
    assert {"full", "triu"} == {o.name for o in graph.operations} - {o.name for o in repeat.copies[0]}


def brute_force(tokens: str) -> int:
    """The most tokens that any tandem repeat covers."""
    size = len(tokens)
    return max(
        (
            count * period
            for period in range(1, size // 2 + 1)
            for begin in range(size)
            for count in range(2, size // period + 1)
            if tokens[begin : begin + count * period] == tokens[begin : begin + period] * count
        ),
        default=0,
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_repeat_is_found(seed: int) -> None:
    """Against exhaustive search, on chains of products whose literals are the letters of a random word."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n, size: torch.randint(n, (size,), generator=generator).tolist()  # noqa: E731
    word = "".join("abc"[n] for n in [*draw(3, 3), *draw(3, 1 + draw(7, 1)[0]) * (1 + draw(4, 1)[0]), *draw(3, 3)])
    meta = TensorMeta((4, 4), torch.float32)
    first = value = Value("x", meta)
    operations = []
    for number, letter in enumerate(word):
        result = Value(f"v{number}", meta)
        scale = {"beta": 1, "alpha": "abc".index(letter)}
        operations.append(Operation(torch.ops.aten.addmm.default, (value, value, value), scale, (result,)))
        value = result
    repeats = find_repeats(Graph((first,), (), tuple(operations), (value,)).verify())
    covered = [len(repeat.copies) * len(repeat.copies[0]) for repeat in repeats]
    assert brute_force(word) == max(covered, default=0)


def feed_forward(weights: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    for up, down in weights:
        x = x + torch.relu(x @ up) @ down
    return x


def feed_forward_plan(weights: P | list[P], **options: Any) -> Plan:
    """Eight layers, over four ranks that have rows of x."""
    step = spmd.jit(gradient(feed_forward), (weights, P("data")), (P("data"), P("data")), mesh=MESH, **options)
    pair = torch.empty(1024, 4096, device="meta"), torch.empty(4096, 1024, device="meta")
    return step.plan([pair] * 8, torch.empty(32768, 1024, device="meta"))


def test_figures_are_those_of_the_operations_of_one_layer() -> None:
    plan = feed_forward_plan(P("data"))
    forward, backward = plan.layers
    ahead, behind = *forward.alike, *backward.alike
    kinds = {kind: [comm for comm in plan.comms if comm.kind == kind] for kind in ("all_gather", "reduce_scatter")}
    assert [16, 16] == [len(found) for found in kinds.values()]  # one a weight, gathered for forward and backward
    for alike, comms in zip((ahead, behind), kinds.values(), strict=True):
        assert pytest.approx(sum(comm.bytes for comm in comms) / 8) == alike.bytes
        assert pytest.approx(sum(comm.seconds for comm in comms) / 8) == alike.communication
    seconds = account(plan).seconds
    made = {value: seconds[operation] for operation in plan.graph.operations for value in operation.tensors}
    for layers, alike in ((forward, ahead), (backward, behind)):
        assert pytest.approx(sum(made[operation.tensors[0]] for operation in layers.copies[3])) == alike.compute
    line = feed_forward.__code__.co_firstlineno + 2
    figures = f"{time_text(ahead.compute + ahead.communication)}, {size_text(ahead.bytes)} sent each"
    assert f"8 layers of 4 operations at test_plan_layers.py:{line}\n  layers 0-7, alike: {figures}" == str(forward)


def test_a_layer_that_lies_otherwise_is_told_by_what_differs_first() -> None:
    plan = feed_forward_plan([P("data") if number == 5 else P() for number in range(8)])
    forward, _ = plan.layers
    usual, other = forward.alike
    assert ("0-4, 6-7", "5", "") == (usual.numbers, other.numbers, usual.otherwise)
    size = 3 / 4 * 1024 * 4096 * 4
    assert f"%mm_10 needs all_gather over data ({size:,.0f} bytes) (and 1 more)" == other.otherwise
    assert (0, 2 * size) == (usual.bytes, other.bytes)
    assert f"layer 5, {other.otherwise}: " in str(forward)


def test_layers_under_a_memory_limit_are_those_that_gather_again() -> None:
    free = feed_forward_plan(P("data"))
    plan = feed_forward_plan(P("data"), memory_limit=int(0.9 * free.memory.peak))
    forward, backward = plan.layers
    assert [alike.bytes for alike in free.layers[0].alike] == [alike.bytes for alike in forward.alike]
    most, rest = backward.alike
    (once,) = {alike.bytes for alike in free.layers[1].alike}
    assert (2 * once, once) == (most.bytes, rest.bytes)  # both weights are gathered again, or neither
    assert "without the all_gather over data" in rest.otherwise
    sent = [sum(comm.bytes for comm in each.comms) for each in (free, plan)]
    assert len(most.layers) * once == sent[1] - sent[0]


def test_a_saved_plan_has_the_same_layers(tmp_path: Path) -> None:
    plan = feed_forward_plan([P("data") if number == 5 else P() for number in range(8)])
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json", plan.request)
    assert list(map(str, plan.layers)) == list(map(str, again.layers))
