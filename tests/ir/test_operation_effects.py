"""Operations with effects: they run as often, and in the order, as written."""

from __future__ import annotations

import torch
from handmade import PlanBuilder, lowered, operators, run

from spmd.core.mesh import make_mesh
from spmd.core.spec import P
from spmd.ir.effects import Effect, declare_effect, effect_of

SEEN: list[list[float]] = []


@torch.library.custom_op("spmd_test::note", mutates_args=())
def note(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(x.tolist())
    return x.clone()


note.register_fake(torch.empty_like)
NOTE = torch.ops.spmd_test.note.default
declare_effect(NOTE, Effect.HOST)
aten = torch.ops.aten


def test_an_effect_on_the_host_happens_on_every_rank_and_as_often_as_written() -> None:
    builder = PlanBuilder(make_mesh({"m": 2}, runtime="virtual"))
    x = builder.input("x", (4,), P("m"))
    doubled = builder.call(aten.mul.Tensor, (x, 2.0), [((4,), P("m"))])
    for value in (x, doubled, x):
        builder.call(NOTE, (value,), [((4,), P("m"))])  # nobody reads the result
    plan = builder.plan(doubled)
    assert 3 == operators(lowered(plan)).count("note")
    SEEN.clear()
    run(plan, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert [[1.0, 2.0], [3.0, 4.0], [2.0, 4.0], [6.0, 8.0], [1.0, 2.0], [3.0, 4.0]] == SEEN


def test_kinds_of_effects() -> None:
    x = torch.ones(2)
    assert Effect.COLLECTIVE is effect_of(torch.ops.spmd.all_reduce.default, (x, "sum", ["m"]), {})
    assert Effect.RANDOM is effect_of(aten.native_dropout.default, (x, 0.5, True), {})
    assert effect_of(aten.native_dropout.default, (x, 0.5, False), {}) is None
    assert effect_of(torch.ops.spmd.shard.default, (x, 0, 1, ["m"]), {}) is None
