"""The virtual runtime: values, memory and the text that it executes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from handmade import PlanBuilder, lowered, run
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.api.jit import jit
from spmd.core.mesh import make_mesh
from spmd.core.spec import P
from spmd.inspect.plan import Plan
from spmd.runtime import VirtualProgram
from spmd.runtime.lockstep import generate_lockstep
from spmd.runtime.varying import varying_axes

aten = torch.ops.aten


def chain(length: int, size: int = 2) -> Plan:
    builder = PlanBuilder(make_mesh({"m": size}, runtime="virtual"))
    value = builder.input("x", (4,), P("m"))
    for index in range(length):
        value = builder.call(aten.add.Tensor, (value, float(index)), [((4,), P("m"))])
    return builder.plan(value)


class LiveCount(TorchDispatchMode):
    """The greatest number of operator results that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.alive += 1
            self.peak = max(self.peak, self.alive)
            weakref.finalize(result, self._gone)
        return result

    def _gone(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize("length", [3, 30])
def test_values_are_freed_at_their_last_use(length: int) -> None:
    program = VirtualProgram(lowered(chain(length)))
    shards = [(torch.ones(2), torch.ones(2))]
    with LiveCount() as live:
        results = program(shards)
    gc.collect()
    # One result, and the value before it, on the rank that runs; the other rank's final result.
    assert live.peak == 3
    assert live.alive == 2
    del results
    assert live.alive == 0


def test_collectives_free_what_they_consumed() -> None:
    builder = PlanBuilder(make_mesh({"m": 2}, runtime="virtual"))
    value = builder.input("x", (4,), P("m"))
    for _ in range(10):
        value = builder.call(aten.neg.default, (builder.move(value, P()),), [((4,), P())])
        value = builder.move(value, P("m"))
    program = VirtualProgram(lowered(builder.plan(value)))
    with LiveCount() as live:
        program([(torch.ones(2), torch.ones(2))])
    assert live.peak <= 8


def test_results_are_deterministic() -> None:
    builder = PlanBuilder(make_mesh({"m": 4}, runtime="virtual"))
    x = builder.input("x", (64,), P(partial={"m": "sum"}))
    plan = builder.plan(builder.move(x, P()))
    program = VirtualProgram(lowered(plan))
    shards = [tuple(torch.randn(64) for _ in range(4))]
    first, second = program(list(shards)), program(list(shards))
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    expected = shards[0][0] + shards[0][1] + shards[0][2] + shards[0][3]
    assert torch.equal(first[0][0], expected)


def test_no_gradient_is_recorded() -> None:
    program = VirtualProgram(lowered(chain(1)))
    (result,) = program([(torch.ones(2, requires_grad=True), torch.ones(2))])
    assert [shard.requires_grad for shard in result] == [False, False]


def test_a_program_without_inputs() -> None:
    builder = PlanBuilder(make_mesh({"m": 2}, runtime="virtual"))
    full = builder.call(aten.full.default, ([3], 2.0), [((3,), P())], kwargs={"dtype": torch.float32})
    assert torch.equal(run(builder.plan(full))[0], torch.full((3,), 2.0))


def test_a_program_without_outputs() -> None:
    builder = PlanBuilder(make_mesh({"m": 2}, runtime="virtual"))
    builder.input("x", (4,), P("m"))
    assert VirtualProgram(lowered(builder.plan()))([(torch.ones(2), torch.ones(2))]) == []


def test_ranks_with_different_views_stay_in_step() -> None:
    """Rank 0 holds two rows of the batch and rank 1 one: where its view changes nothing, it has one node less."""
    builder = PlanBuilder(make_mesh({"m": 2}, runtime="virtual"))
    x = builder.input("x", (3, 2, 2), P("m"))
    flat = builder.call(aten.view.default, (x, [6, 2]), [((6, 2), P("m"))], atoms=[(3, 2), (2,)])
    twice = builder.call(aten.mul.Tensor, (flat, 2.0), [((6, 2), P("m"))], atoms=[(3, 2), (2,)])
    plan = builder.plan(builder.relabel(builder.move(twice, P()), [(6,), (2,)], P()))
    value = torch.arange(12.0).view(3, 2, 2)
    assert torch.equal(run(plan, value)[0], value.view(6, 2) * 2)


def test_generated_text_deletes_and_yields() -> None:
    builder = PlanBuilder(make_mesh({"m": 2}, runtime="virtual"))
    x = builder.input("x", (4,), P("m"))
    moved = builder.move(builder.call(aten.neg.default, (x,), [((4,), P("m"))]), P())
    program = lowered(builder.plan(moved))
    expected = [
        "def program(inputs, numbers=()):",
        "    [[v0]] = inputs",
        "    inputs.clear()",
        "    v1 = g0(v0)",
        "    del v0",
        "    results = yield g2, [((v1, 0, 4, ['m'], ), {})], g1",
        "    v2 = results[1]",
        "    results.clear()",
        "    del v1",
        "    yield None, ([v2], ), g3",
    ]
    assert expected == generate_lockstep(program.graph(), program.mesh, [1]).generated.source.splitlines()


def test_generated_text_of_several_ranks_computes_instances_in_a_loop() -> None:
    builder = PlanBuilder(make_mesh({"m": 2}, runtime="virtual"))
    w, x = builder.input("w", (4,), P()), builder.input("x", (4,), P("m"))
    twice = builder.call(aten.neg.default, (w,), [((4,), P())])
    moved = builder.move(builder.call(aten.neg.default, (x,), [((4,), P("m"))]), P())
    program = lowered(builder.plan(builder.call(aten.add.Tensor, (moved, twice), [((4,), P())])))
    varying = varying_axes([program.graph()], program.mesh, program.input_specs)
    expected = [
        "def program(inputs, numbers=()):",
        "    [[v0], v1s] = inputs",
        "    inputs.clear()",
        "    v2 = g0(v0)",
        "    del v0",
        "    v3s = []",
        "    for index, rank in enumerate(g1):",
        "        v1, v1s[index] = v1s[index], None",
        "        v3 = g0(v1)",
        "        v3s.append(v3)",
        "        del v1, v3",
        "    del v1s",
        "    results = yield g3, [((v3s[index], 0, 4, ['m'], ), {}) for index, rank in enumerate(g1)], g2",
        "    v4 = results[0]",
        "    results.clear()",
        "    del v3s",
        "    v5 = g4(v4, v2)",
        "    del v4, v2",
        "    yield None, ([v5], ), g5",
    ]
    generated = generate_lockstep(program.graph(), program.mesh, range(2), varying).generated
    assert expected == generated.source.splitlines()


@pytest.mark.parametrize("scalar", [float("inf"), float("-inf"), 1e300, -3, True])
def test_scalars_survive_the_text(scalar: float) -> None:
    builder = PlanBuilder(make_mesh({"m": 2}, runtime="virtual"))
    x = builder.input("x", (4,), P("m"))
    plan = builder.plan(builder.call(aten.mul.Tensor, (x, scalar), [((4,), P("m"))]))
    assert torch.equal(run(plan, torch.ones(4))[0], torch.ones(4) * scalar)


@pytest.mark.parametrize(
    ("function", "kind", "operator"),
    [
        (lambda x: x.long().softmax(0), NotImplementedError, "aten._softmax.default on i64"),
        (lambda x: torch.nn.functional.embedding(x.long() + 9, x), IndexError, "aten.embedding.default on f32"),
    ],
)
def test_an_error_of_a_kernel_names_the_operator_and_the_line(function, kind, operator):
    jitted = jit(function, P("x"), P(), mesh=make_mesh({"x": 2}, runtime="virtual"))
    for _ in range(2):
        with pytest.raises(kind, match=rf"\n  In {operator}.* of this rank, at test_runtime.py:\d+"):
            jitted(torch.ones(4, 4))
