"""Operators that return nothing, or that torch marks as having side effects: they run as often as written, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.node import has_side_effect
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import P
from spmd.collectives import axis_index, psum
from spmd.lowering.verify import verify
from spmd.rules import RULES, custom_operator, factors

pytestmark = pytest.mark.filterwarnings("ignore::spmd.api.programs.missing_rules.MissingRuleWarning")

LINE = spmd.make_mesh({"x": 2}, runtime="virtual")
GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _no_earlier_effects() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


@torch.library.custom_op("spmd_effects::note", mutates_args=())
def note(x: torch.Tensor) -> None:
    SEEN.append(x.tolist())


@torch.library.custom_op("spmd_effects::tell", mutates_args=())
def tell(word: str) -> None:
    SEEN.append(word)


@torch.library.custom_op("spmd_effects::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(x.tolist())
    return x + 1


@torch.library.custom_op("spmd_effects::listed", mutates_args=())
def listed(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(x.tolist())
    return x + 1


@torch.library.custom_op("spmd_effects::fills", mutates_args=("out",))
def fills(out: torch.Tensor) -> None:
    out.fill_(7.0)


counted.register_fake(torch.empty_like)
listed.register_fake(torch.empty_like)
note.register_vmap(lambda info, in_dims, x: (note(x.movedim(in_dims[0], 0)), None))
_register_effectful_op(counted, _EffectType.ORDERED)
has_side_effect(torch.ops.spmd_effects.listed.default)

NOTE = torch.ops.spmd_effects.note.default
SHARDED = RULES | {NOTE: factors("... ->")}
"""Dims of length 1 are not sharded by `...`."""


def noted(x: torch.Tensor) -> torch.Tensor:
    note(x)
    return x * x


def seen(function: Callable[..., Any], *args: Any) -> tuple[torch.Tensor, list[Any]]:
    """The result of a call, and its effects; the second call of a function must have the same."""
    SEEN.clear()
    first = function(*args)
    effects = list(SEEN)
    SEEN.clear()
    function(*args)
    assert effects == SEEN
    return (first.full_tensor() if isinstance(first, spmd.DTensor) else first), effects


@pytest.mark.parametrize("length", [8, 5, 3, 0])
def test_in_jit_every_rank_has_the_whole_value_or_the_shard_that_a_rule_allows(length: int) -> None:
    x = torch.arange(float(length))
    step = spmd.jit(noted, P("x"), P("x"), mesh=GRID)
    result, effects = seen(step, x)
    assert torch.equal(x * x, result)
    assert [x.tolist()] * 4 == effects
    verify(step.lower(x))
    result, effects = seen(spmd.jit(noted, P("x"), P("x"), mesh=GRID, rules=SHARDED), x)
    assert torch.equal(x * x, result)
    half = -(-length // 2)
    assert [x[:half].tolist()] * 2 + [x[half:].tolist()] * 2 == effects


def test_a_pending_sum_is_reduced_first() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        note(x.sum())
        return x

    assert [6.0, 6.0] == seen(spmd.jit(function, P("x"), P("x"), mesh=LINE, rules=SHARDED), torch.arange(4.0))[1]


@pytest.mark.parametrize("length", [4, 3, 1])
def test_in_shard_map_each_rank_has_its_own(length: int) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        note(axis_index("x"))
        tell("here")
        note(x)
        return psum(x, "x") if length == 4 else x

    x = torch.arange(float(length))
    half = -(-length // 2)
    mapped = spmd.shard_map(body, LINE, P("x"), P() if length == 4 else P("x"))
    expected = [0, 1, "here", "here", x[:half].tolist(), x[half:].tolist()]
    assert expected == seen(mapped, x)[1]
    assert expected == seen(spmd.jit(mapped, P("x"), mesh=LINE), x)[1]


@pytest.mark.parametrize("operator", [counted, listed], ids=["registered as effectful", "listed by torch.fx"])
def test_what_torch_marks_stays_though_its_results_are_unused(operator: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        operator(x)
        return operator(x) * 2

    x = torch.tensor([1.0, 2.0])
    result, effects = seen(spmd.jit(function, P("x"), P("x"), mesh=LINE), x)
    assert [[1.0, 2.0]] * 4 == effects
    assert [4.0, 6.0] == result.tolist()
    result, effects = seen(spmd.shard_map(function, LINE, P("x"), P("x")), x)
    assert [[1.0], [2.0], [1.0], [2.0]] == effects
    assert [4.0, 6.0] == result.tolist()


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("where", ["jit", "shard_map", "eager", "scalar"])
def test_assertions_are_made(where: str, holds: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 4).all(), "too big")
        return x + 1

    def scalar(x: torch.Tensor) -> torch.Tensor:
        torch._assert_scalar(x.shape[0] == (4 if holds else 5), "too big")
        return x + 1

    x = torch.arange(4.0) + (0 if holds else 1)
    calls: Mapping[str, Callable[[], Any]] = {
        "jit": lambda: spmd.jit(function, P("x"), P("x"), mesh=LINE)(x),
        "shard_map": lambda: spmd.shard_map(function, LINE, P("x"), P("x"))(x),
        "eager": lambda: function(spmd.distribute(x, P("x"), LINE)),
        "scalar": lambda: spmd.jit(scalar, P("x"), P("x"), mesh=LINE)(x),
    }
    if holds:
        assert torch.equal(x + 1, calls[where]().full_tensor())
        return
    with pytest.raises(RuntimeError, match=r"too big"):
        calls[where]()


def test_an_error_names_the_operator_and_the_line() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.sum() > 0, "negative")
        return x

    with pytest.raises(RuntimeError, match=r"negative\n  In aten._assert_async.msg on .*test_effectful_operators.py"):
        spmd.jit(function, P("x"), P("x"), mesh=LINE)(-torch.ones(2))


def test_outside_of_programs() -> None:
    x = spmd.distribute(torch.arange(4.0), P("x"), LINE)
    assert note(x) is None
    note(x)
    assert [[0.0, 1.0, 2.0, 3.0]] * 4 == SEEN


def test_uncompiled() -> None:
    x = torch.arange(4.0)
    with spmd.disable_jit():
        assert [[0.0, 1.0], [2.0, 3.0]] == seen(spmd.shard_map(noted, LINE, P("x"), P("x")), x)[1]
        assert [x.tolist()] == seen(spmd.jit(noted, P("x"), P("x"), mesh=LINE), x)[1]


def asserted(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x < 4).all(), "too big")
    tell("forward")
    return x * x


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad(lambda x: asserted(x).sum()),
        lambda x: torch.func.jvp(asserted, (x,), (torch.ones_like(x),))[1],
        torch.func.grad(torch.func.grad(lambda x: (asserted(x) * x).sum())),
    ],
    ids=["grad", "jvp", "grad of grad"],
)
def test_under_derivatives_effects_are_of_the_forward_pass(transform: Callable[..., torch.Tensor]) -> None:
    x = torch.tensor(3.0)
    expected = transform(x)
    SEEN.clear()
    result, effects = seen(spmd.jit(transform, P(), P(), mesh=LINE), x)
    assert torch.equal(expected, result)
    assert ["forward"] * 2 == effects
    with pytest.raises(RuntimeError, match=r"too big"):
        spmd.jit(transform, P(), P(), mesh=LINE)(x + 1)


def test_under_backward_effects_are_of_the_forward_pass() -> None:
    step = spmd.jit(noted, P("x"), P("x"), mesh=LINE, rules=SHARDED)
    x = spmd.distribute(torch.arange(4.0), P("x"), LINE).requires_grad_()
    loss = step(x).sum()
    assert [[0.0, 1.0], [2.0, 3.0]] == SEEN
    loss.backward()
    assert [[0.0, 1.0], [2.0, 3.0]] == SEEN
    assert x.grad is not None
    assert [0.0, 2.0, 4.0, 6.0] == x.grad.full_tensor().tolist()


def test_a_checkpointed_region_has_its_effects_once() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(checkpoint(lambda y: noted(y.sin()).sum(), x, use_reentrant=False), x)
        return found

    x = torch.zeros(2)
    assert [[0.0], [0.0]] == seen(spmd.jit(function, P("x"), P("x"), mesh=LINE, rules=SHARDED), x)[1]


def test_effects_keep_their_order_beside_prints_and_random_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        tell("first")
        drawn = torch.rand(2)
        note(drawn)
        spmd.debug.print("printed")
        tell("second")
        return x + drawn

    torch.manual_seed(0)
    drawn = torch.rand(2)
    step = spmd.jit(function, P("x"), P("x"), mesh=LINE)
    torch.manual_seed(0)
    assert torch.equal(drawn, step(torch.zeros(2)).full_tensor())
    assert ["first", "first", drawn.tolist(), drawn.tolist(), "second", "second"] == SEEN
    assert "[rank 0] printed\n[rank 1] printed\n" == capsys.readouterr().out


def test_under_vmap_an_operator_needs_its_rule_as_in_torch() -> None:
    x = torch.arange(4.0).view(2, 2)
    step = spmd.jit(torch.vmap(noted), P("x"), P("x"), mesh=LINE, rules=SHARDED)
    assert [[[0.0, 1.0]], [[2.0, 3.0]]] == seen(step, x)[1]
    SEEN.clear()
    torch.vmap(spmd.jit(noted, P("x"), P("x"), mesh=LINE))(x)
    assert [x.tolist()] * 2 == SEEN
    for function in (torch.vmap(asserted), spmd.jit(torch.vmap(asserted), P("x"), P("x"), mesh=LINE)):
        with pytest.raises(RuntimeError, match=r"does not support operations with no returns"):
            function(x)


def test_a_custom_operator_without_results_is_sharded_and_batched_by_its_pattern() -> None:
    operator = custom_operator(note, "i ->")

    def function(x: torch.Tensor) -> torch.Tensor:
        operator(x)
        return x.sin().sum()

    rules = RULES | operator.rules
    x = torch.arange(4.0)
    assert [[0.0, 1.0], [2.0, 3.0]] == seen(spmd.jit(torch.func.grad(function), P("x"), mesh=LINE, rules=rules), x)[1]
    batched = spmd.jit(torch.vmap(function), P(), P(), mesh=LINE, rules=rules)
    rows = seen(batched, x.view(2, 2))[1]
    assert [[0.0, 1.0]] * 2 + [[2.0, 3.0]] * 2 == rows


def test_an_operator_that_writes_to_an_operand_has_no_other_effect() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        unused, out = torch.zeros(2), torch.zeros(2)
        fills(unused)
        fills(out)
        return x + out

    step = spmd.jit(function, P("x"), P("x"), mesh=LINE)
    assert [7.0, 7.0] == step(torch.zeros(2)).full_tensor().tolist()
    assert 1 == str(step.plan(torch.zeros(2))).count(" = spmd_functional.")


def test_no_effect_is_made_while_a_function_is_traced_or_planned() -> None:
    step = spmd.jit(noted, P("x"), P("x"), mesh=LINE)
    step.plan(torch.zeros(2))
    step.lower(torch.zeros(2))
    assert [] == SEEN
