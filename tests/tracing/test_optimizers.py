"""Optimizers that become torch's fused operators, and functions that look like one and must not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd as torchs_sgd

import spmd
from spmd import P
from spmd.ir.list_operators import FUSED
from spmd.optim import adamw, clip_by_global_norm, master_weights, sgd
from spmd.tracing.optimizers import formulas

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
ROWS = P("data")
SHAPES = ((5, 3), (7,), (4, 2))
B1, B2, LR, EPS = 0.9, 0.99, 0.1, 1e-6


def draw(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def squares(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [x.square() for x in draw(4, dtype)]


def fused(step: Any, *args: Any) -> list[tuple[str, dict[str, Any]]]:
    """The fused operators in the plan of a jitted function, with their options, each once."""
    found = []
    for operation in step.plan(*args).graph.operations:
        if operation.op in FUSED:
            options = {
                key: value if isinstance(value, float) else bool(value) for key, value in operation.kwargs.items()
            }
            found.append((operation.name, options))
    return [item for index, item in enumerate(found) if item not in found[:index]]


def check(function: Callable[..., Any], *args: Any, specs: Any = ROWS) -> list[tuple[str, dict[str, Any]]]:
    """The fused operators of a function, whose values on shards must be those on one device."""
    expected = torch.utils._pytree.tree_leaves(function(*args))
    step = spmd.jit(function, specs, None, mesh=MESH)
    found = torch.utils._pytree.tree_leaves(step(*args))
    for ours, theirs in zip(found, expected, strict=True):
        close = {"rtol": 1e-7, "atol": 1e-7} if theirs.dtype is torch.float64 else {}  # ours has float32 corrections
        torch.testing.assert_close(ours.full_tensor(), theirs, **close)
    return fused(step, *args)


def names(found: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [name for name, _ in found]


def states(optimizer: spmd.optim.Optimizer, params: Any, steps: int = 3) -> Any:
    """Parameters and state after some steps."""
    state = optimizer.init(params)
    for seed in range(steps):
        params, state = optimizer.step(params, state, draw(seed + 10, params[0].dtype))
    return params, state


def specs_of(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: P("data") if x.ndim else P(), tree)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (adamw(), "_fused_adam"),
        (adamw(0.1, 0.8, 0.95, 1e-3, 0.1), "_fused_adamw"),
        (adamw(torch.tensor(0.1), weight_decay=0.1), "_fused_adamw"),
        (sgd(0.1, 0.9), "_fused_sgd"),
        (sgd(0.1, 0.3), "_fused_sgd"),
        (sgd(0.1, 0.9, nesterov=True, weight_decay=0.2), "_fused_sgd"),
        (sgd(torch.tensor(0.1), 0.9, weight_decay=0.2), "_fused_sgd"),
        (clip_by_global_norm(0.1, adamw(0.1)), "_fused_adam"),
        (clip_by_global_norm(0.1, sgd(0.1, 0.9)), "_fused_sgd"),
    ],
)
def test_our_optimizers(optimizer: spmd.optim.Optimizer, name: str, dtype: torch.dtype) -> None:
    params, state = states(optimizer, draw(0, dtype))
    args = params, state, draw(1, dtype)
    assert [name] == names(check(optimizer.step, *args, specs=specs_of(args)))


def test_constants_are_read_exactly() -> None:
    def options(optimizer: spmd.optim.Optimizer) -> dict[str, Any]:
        params, state = states(optimizer, draw(0), 1)
        step = spmd.jit(optimizer.step, P(), P(), mesh=MESH)
        ((_, found),) = fused(step, params, state, draw(1))
        return found

    assert options(adamw(3e-4, 0.9, 0.999, 1e-8, 0.01)) == {
        "lr": 3e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False,
        "maximize": False,
    }  # fmt: skip
    assert options(sgd(0.03, 0.9, nesterov=True, weight_decay=1e-4)) == {
        "weight_decay": 1e-4, "momentum": 0.9, "lr": 0.03, "dampening": 0.0, "nesterov": True, "maximize": False,
        "is_first_step": False,
    }  # fmt: skip


def test_master_weights() -> None:
    optimizer = master_weights(adamw(0.1, weight_decay=0.1))
    params = draw(0, torch.bfloat16)
    state = optimizer.init(params)
    args = params, state, draw(1, torch.bfloat16)
    assert ["_fused_adamw"] == names(check(optimizer.step, *args, specs=specs_of(args)))


def test_a_rate_from_a_schedule() -> None:
    def update(params: Any, state: Any, grads: Any) -> Any:
        rate = 0.1 * torch.cos(state.step * 0.01)
        return adamw(rate, weight_decay=0.1).step(params, state, grads)

    params, state = states(adamw(), draw(0, torch.float32))
    args = params, state, draw(1, torch.float32)
    assert ["_fused_adamw"] == names(check(update, *args, specs=specs_of(args)))


def test_several_steps_in_one_function() -> None:
    optimizer = adamw(0.1, weight_decay=0.1)

    def update(params: Any, state: Any, grads: Any, more: Any) -> Any:
        params, state = optimizer.step(params, state, grads)
        return optimizer.step(params, state, more)

    params, state = states(optimizer, draw(0))
    args = params, state, draw(1), draw(2)
    assert ["_fused_adamw"] == names(check(update, *args, specs=specs_of(args)))
    step = spmd.jit(update, specs_of(args), None, mesh=MESH)
    assert 2 == step.lower(*args).as_text().count("= fused_adamw(")


def test_a_step_that_depends_on_another() -> None:
    """Two optimizers with the same constants: the second one's gradients are those at the first one's result."""
    optimizer = adamw(0.1)

    def update(params: Any, state: Any, others: Any, other_state: Any, grads: Any) -> Any:
        params, state = optimizer.step(params, state, grads)
        others, other_state = optimizer.step(others, other_state, [p.sin() for p in params])
        return params, state, others, other_state

    params, state = states(optimizer, draw(0))
    args = params, state, params, state, draw(1)
    assert ["_fused_adam"] == names(check(update, *args, specs=specs_of(args)))
    assert 2 == spmd.jit(update, specs_of(args), None, mesh=MESH).lower(*args).as_text().count("= fused_adam(")


TORCH_ADAM = [
    {},
    {"weight_decay": 0.1},
    {"maximize": True},
    {"weight_decay": 0.1, "maximize": True},
    {"eps": 0.1, "beta1": 0.5},
]


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("way", ["single", "foreach", "fused"])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("options", TORCH_ADAM, ids=str)
def test_torchs_adam(
    options: dict[str, Any], decoupled: bool, way: str, rate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "foreach" and isinstance(rate, Tensor) and decoupled:
        pytest.skip("torch reads the number of the tensor")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # else a CPU does not have capturable=True
    given = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.0, "maximize": False, **options}

    def update(params: Any, means: Any, squares: Any, steps: Any, grads: Any) -> Any:
        p, m, v, t, g = ([x.clone() for x in xs] for xs in (params, means, squares, steps, grads))
        adam(
            p, g, m, v, [], t, foreach=way == "foreach", capturable=way != "fused", fused=way == "fused",
            amsgrad=False, lr=rate, decoupled_weight_decay=decoupled, **given,
        )  # fmt: skip
        return p, m, v, t

    steps = [torch.tensor(count, dtype=torch.float64) for count in (1, 4, 9)]
    args = draw(0), draw(3), squares(), steps, draw(1)
    ((name, found),) = check(update, *args, specs=specs_of(args))
    assert ("_fused_adamw" if decoupled and given["weight_decay"] else "_fused_adam") == name
    assert given["maximize"] == found["maximize"]
    assert pytest.approx(given["weight_decay"], rel=1e-9) == found["weight_decay"]


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_parameters_with_numbers_of_steps_of_their_own_are_examined_once(
    rate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined, examine = [], formulas.adam
    monkeypatch.setattr(formulas, "adam", lambda *args: examined.append(args) or examine(*args))
    counts = []
    for number in (1, 6):
        params = [spmd.distribute(torch.randn(3 + size, 2), ROWS, MESH) for size in range(number)]
        for param in params:
            param.requires_grad_().grad = torch.ones_like(param)
        examined.clear()
        torch.optim.AdamW(params, lr=rate, fused=True).step()
        counts.append(len(examined))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("way", ["single", "foreach", "fused"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dampening": 0.2},
        {"nesterov": True},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "nesterov": True, "momentum": 0.4},
    ],
    ids=str,
)
def test_torchs_sgd(options: dict[str, Any], way: str) -> None:
    given = {
        "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "maximize": False, **options
    }  # fmt: skip

    def update(params: Any, buffers: Any, grads: Any) -> Any:
        p, b, g = ([x.clone() for x in xs] for xs in (params, buffers, grads))
        torchs_sgd(p, g, b, foreach=way == "foreach", fused=way == "fused", lr=0.1, **given)
        return p, b

    ((name, found),) = check(update, draw(0), draw(3), draw(1))
    assert "_fused_sgd" == name
    assert {key: value for key, value in found.items() if key in given} == pytest.approx(given, rel=1e-9)


def by_hand(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, *, inside: bool = False, correct: bool = True
) -> tuple[Tensor, ...]:
    """Adam as in its paper, and torchopt: eps in the root or outside of it, with or without bias corrections."""
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
    first, second = (1 - B1**step, 1 - B2**step) if correct else (1.0, 1.0)
    corrected = v / second
    root = (corrected + EPS).sqrt() if inside else corrected.sqrt() + EPS
    return p - LR * (m / first) / root, m, v


ONE = (draw(0)[0], draw(1)[0], draw(3)[0], squares()[0], torch.tensor(3.0, dtype=torch.float64))
ONE_SPECS = (P("data"), P("data"), P("data"), P("data"), P())


def test_adam_by_hand() -> None:
    ((name, options),) = check(by_hand, *ONE, specs=ONE_SPECS)
    assert (name, options["eps"], options["lr"], options["beta1"], options["beta2"]) == ("_fused_adam", EPS, LR, B1, B2)


def returns_update(p: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    new, m, v = by_hand(torch.zeros_like(p), *rest)
    return p + new, new, m, v


def reads_root(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
    root = (v / (1 - B2**step)).sqrt()
    return p - LR * (m / (1 - B1**step)) / (root + EPS), m, v, root.sum()


def rate_of_moments(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    """The learning rate depends on a new state, so the step cannot compute the state."""
    new, m, v = by_hand(torch.zeros_like(p), g, m, v, step)
    return p + new * m.norm(), m, v


def other_gradient(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g.sin() * g.sin()
    return p - LR * (m / (1 - B1**step)) / ((v / (1 - B2**step)).sqrt() + EPS), m, v


def other_correction(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
    return p - LR * (m / (1 - 0.91**step)) / ((v / (1 - B2**step)).sqrt() + EPS), m, v


def unbalanced(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    m, v = B1 * m + 0.2 * g, B2 * v + (1 - B2) * g * g
    return p - LR * (m / (1 - B1**step)) / ((v / (1 - B2**step)).sqrt() + EPS), m, v


def grows(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    """The parameter moves along the gradient, which no option of the fused operator says."""
    new, m, v = by_hand(-p, g, m, v, step)
    return -new, m, v


def broadcast(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    """A learning rate for each column."""
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
    rate = torch.tensor([0.1, 0.2, 0.3], dtype=p.dtype)
    return p - rate * (m / (1 - B1**step)) / ((v / (1 - B2**step)).sqrt() + EPS), m, v


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(by_hand, inside=True), functools.partial(by_hand, correct=False), returns_update, reads_root,
        rate_of_moments, other_gradient, other_correction, unbalanced, broadcast,
    ],
)  # fmt: skip
def test_near_misses_stay_as_they_are(function: Callable[..., Any]) -> None:
    assert [] == check(function, *ONE, specs=ONE_SPECS)


def test_updates_that_are_added_at_the_end() -> None:
    """As TorchOpt writes it: a zero below the root, and a decay that is a part of the update."""

    def function(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        update = (m / (1 - B1**step)) / ((v / (1 - B2**step) + 0.0).sqrt() + EPS)
        return p + (update + 0.01 * p) * -LR, m, v

    ((name, options),) = check(function, *ONE, specs=ONE_SPECS)
    assert (name, options["lr"]) == ("_fused_adamw", LR)
    assert options["weight_decay"] == pytest.approx(0.01, rel=1e-9)


def test_an_update_with_its_decay_is_no_step() -> None:
    """The update is a step of the decay, but what it is added to is the parameter."""

    def function(p: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        new, m, v = by_hand(-0.01 * LR * p, *rest)
        return p + new, m, v

    ((name, options),) = check(function, *ONE, specs=ONE_SPECS)
    assert (name, options["lr"]) == ("_fused_adamw", LR)
    assert options["weight_decay"] == pytest.approx(0.01, rel=1e-9)


def test_a_sign_of_the_parameter() -> None:
    check(grows, *ONE, specs=ONE_SPECS)


def test_groups_of_other_constants() -> None:
    def update(params: Any, grads: Any, means: Any, squares: Any, step: Tensor) -> Any:
        found = []
        for number, (p, g, m, v) in enumerate(zip(params, grads, means, squares, strict=True)):
            optimizer = adamw(0.1, 0.9 if number else 0.8)
            found.append(optimizer.step(p, spmd.optim.AdamWState(step, m, v), g))
        return found

    args = draw(0), draw(1), draw(3), squares(), torch.tensor(3)
    found = check(update, *args, specs=specs_of(args))
    assert [0.8, 0.9] == sorted(options["beta1"] for _, options in found)


def test_momentum_that_looks_like_a_step() -> None:
    """Plain functions of this form are computed by the fused operator, too: only their values count."""

    def function(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        y = 0.5 * y + 0.5 * z
        return x - 0.1 * y, y

    check(function, draw(0)[0], draw(1)[0], draw(3)[0])


@pytest.mark.parametrize("limit", [0.5, 5.0, 1e6])
def test_clipped_gradients(limit: float) -> None:
    """A clip that the points of a comparison might not see is no part of the step."""

    def clipped(p: Tensor, g: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return by_hand(p, (1e3 * g).clamp(-limit, limit), *rest)

    assert ["_fused_adam"] == names(check(clipped, *ONE, specs=ONE_SPECS))


def test_rates_in_pieces() -> None:
    """A rate that falls at one step: it is a value, and not the number that it is at most steps."""

    def update(params: Any, state: Any, grads: Any) -> Any:
        rate = torch.where(state.step == 500, 1e-3, 0.1)
        return adamw(rate, weight_decay=0.1).step(params, state, grads)

    params, state = states(adamw(), draw(0, torch.float32))
    for step in (499, 500):
        args = params, state._replace(step=torch.tensor(step)), draw(1, torch.float32)
        assert ["_fused_adamw"] == names(check(update, *args, specs=specs_of(args)))


@pytest.mark.parametrize(
    "function",
    [
        lambda p, b, g: (p - 0.1 * (0.9 * b + g), b),
        lambda p, b, g: (p + 0.1 * (0.9 * b + g), 0.9 * b + g),
        lambda p, b, g: (p - 0.1 * (0.9 * b + g * g), 0.9 * b + g * g * g),
        lambda p, b, g: (p - 0.1 * (0.9 * b - g), 0.9 * b - g),
        lambda p, b, g: (p - 0.1 * (0.8 * (0.9 * b + g) + g), 0.9 * b + g),
    ],
)
def test_near_misses_of_sgd(function: Callable[..., Any]) -> None:
    assert [] == check(function, draw(0)[0], draw(1)[0], draw(3)[0])


def test_half_precision_stays() -> None:
    optimizer = adamw(0.1)
    params = draw(0, torch.bfloat16)
    step = spmd.jit(optimizer.step, P(), P(), mesh=MESH)
    assert [] == fused(step, params, optimizer.init(params), draw(1, torch.bfloat16))


def test_derivatives_of_a_step() -> None:
    optimizer = adamw(0.1, eps=0.1)
    params, state = states(optimizer, draw(0))
    step, grads = spmd.jit(optimizer.step, P(), P(), mesh=MESH), draw(1)

    def loss(update: Callable[..., Any], scale: Tensor) -> Tensor:
        new, _ = update(params, state, [g * scale for g in grads])
        return sum(p.square().sum() for p in new)  # type: ignore[return-value]

    one = torch.tensor(0.7, dtype=torch.float64)
    expected = torch.func.grad(functools.partial(loss, optimizer.step))(one)
    torch.testing.assert_close(torch.func.grad(functools.partial(loss, step))(one), expected)
    inner = spmd.jit(torch.func.grad(functools.partial(loss, optimizer.step)), P(), P(), mesh=MESH)
    torch.testing.assert_close(inner(one).full_tensor(), expected)


def test_a_step_per_rank() -> None:
    optimizer = adamw(0.1, weight_decay=0.1)
    params = [torch.randn(4, 3), torch.randn(2)]
    args = params, optimizer.init(params), [x.sin() for x in params]
    specs = specs_of(args)
    step = spmd.jit(spmd.shard_map(optimizer.step, MESH, specs, specs[:2]), specs, None, mesh=MESH)
    assert ["_fused_adamw"] == names(fused(step, *args))
    found = torch.utils._pytree.tree_leaves(step(*args))
    for ours, theirs in zip(found, torch.utils._pytree.tree_leaves(optimizer.step(*args)), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


def test_optimizers_elsewhere() -> None:
    """Outside of jit, and with jit disabled."""
    optimizer = adamw(0.1, weight_decay=0.1)
    params, state = states(optimizer, draw(0))
    expected, _ = optimizer.step(params, state, draw(1))
    placed = spmd.distribute((params, state, draw(1)), P(), MESH)
    eager, _ = optimizer.step(*placed)
    with spmd.disable_jit():
        uncompiled, _ = spmd.jit(optimizer.step, P(), P(), mesh=MESH)(*placed)
    for found in (eager, uncompiled):
        torch.testing.assert_close([x.full_tensor() for x in found], expected)
