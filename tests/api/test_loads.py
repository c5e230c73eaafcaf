"""Plain states loaded into modules and optimizers of DTensors, copies of plain tensors, and scaled gradients."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from workers import Workers, call_on_mesh

import spmd
from spmd import P
from spmd.errors import DivergenceError, ShardingError

MESHES = {
    "two": spmd.make_mesh({"data": 2}, runtime="virtual"),
    "three": spmd.make_mesh({"data": 3}, runtime="virtual"),
    "grid": spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual"),
}
INPUT = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
AnyOptimizer = Callable[..., torch.optim.Optimizer]


def plain_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(3, 5, bias=False), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    return torch.nn.Sequential(*layers)


def distributed(mesh: spmd.Mesh) -> torch.nn.Module:
    specs = lambda name, module, mesh: {key: P("data") for key, _ in module.named_parameters(recurse=False)}  # noqa: E731
    return spmd.distribute_module(plain_model(), mesh, specs)


def assert_same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[name].full_tensor(), value, msg=lambda text, n=name: f"{n}: {text}"
        )


def backward(model: torch.nn.Module, mesh: spmd.Mesh | None) -> torch.Tensor:
    x = INPUT if mesh is None else spmd.distribute(INPUT, P("data"), mesh)
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss


OPTIMIZERS: dict[str, AnyOptimizer] = {
    "sgd": lambda p, **kw: torch.optim.SGD(p, 0.1, momentum=0.9, **kw),
    "adam": lambda p, **kw: torch.optim.Adam(p, 0.1, amsgrad=True, **kw),
    "adamw": lambda p, **kw: torch.optim.AdamW(p, 0.1, **kw),
    "adagrad": lambda p, **kw: torch.optim.Adagrad(p, 0.1, lr_decay=0.1, weight_decay=0.1, **kw),
}
PLAIN: dict[str, AnyOptimizer] = {
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9),
    "rprop": torch.optim.Rprop,
}
FORMS = [{}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_forms_of_optimizers(name: str, form: dict[str, bool], mesh: spmd.Mesh) -> None:
    model, expected = distributed(mesh), plain_model()
    for held, where in ((model, mesh), (expected, None)):
        optimizer = OPTIMIZERS[name](held.parameters(), **form)
        for _ in range(3):
            optimizer.zero_grad()
            backward(held, where)
            optimizer.step()
    assert_same(model, expected)


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradient_scaler(name: str, form: dict[str, bool], infinite: bool) -> None:
    mesh, scales = MESHES["two"], []
    model, expected = distributed(mesh), plain_model()
    for held, where in ((model, mesh), (expected, None)):
        optimizer = OPTIMIZERS[name](held.parameters(), **form)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for number in range(4):
            optimizer.zero_grad()
            x = INPUT if where is None else spmd.distribute(INPUT, P("data"), where)
            scaler.scale(held(x).square().mean()).backward()
            if infinite and number == 1:
                held[0].weight.grad[4, 0] = float("inf")  # type: ignore[index]
            if number != 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(held.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] == (8.0 if infinite else 32.0)
    assert_same(model, expected)


def test_scaled_gradients_are_checked_by_one_number() -> None:
    model = distributed(MESHES["two"])
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    scaler.scale(backward(model, MESHES["two"]))
    with spmd.comms_of() as sent:
        scaler.unscale_(optimizer)
    assert sent.count() == {"all_reduce": 1} and sent.bytes == 4


def test_a_number_that_is_plain_takes_what_is_written_to_it() -> None:
    x = spmd.distribute(torch.arange(6.0), P("data"), MESHES["two"])
    total = torch.zeros(())
    for _ in range(2):
        total += x.sum()
    assert type(total) is torch.Tensor and total == 30
    values, places = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    result = torch.max(x[None], 1, out=(values, places))
    assert result.values is values and values == 5 and places == 5
    with pytest.raises(ShardingError, match=r"writes values of a DTensor to a plain tensor f32\[2\]"):
        torch.zeros(2).copy_(x[:2])


def test_gradients_are_written_to() -> None:
    model, expected = distributed(MESHES["three"]), plain_model()
    for held, where in ((model, MESHES["three"]), (expected, None)):
        backward(held, where)
        held[0].weight.grad[1] = 0.0  # type: ignore[index]
        torch.optim.SGD(held.parameters(), 0.1).step()
    assert_same(model, expected)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *PLAIN])
def test_states_of_optimizers_take_the_specs_of_parameters(name: str, mesh: spmd.Mesh) -> None:
    make = {**OPTIMIZERS, **PLAIN}[name]
    model, expected = distributed(mesh), plain_model()
    ours, theirs = make(model.parameters()), make(expected.parameters())
    backward(expected, None)
    theirs.step()
    saved = copy.deepcopy(theirs.state_dict())
    for _ in range(2):  # the second time, in place of states
        ours.load_state_dict(saved)
    model.load_state_dict(expected.state_dict())
    for held, optimizer, where in ((model, ours, mesh), (expected, theirs, None)):
        for _ in range(2):
            optimizer.zero_grad()
            backward(held, where)
            optimizer.step()
    assert_same(model, expected)
    for parameter, value in itertools.product(model.parameters(), [*ours.state.values()]):
        for leaf in value.values() if ours.state[parameter] is value else ():
            if isinstance(leaf, torch.Tensor) and leaf.shape == parameter.shape:
                assert leaf.placements == parameter.placements  # type: ignore[attr-defined]
    assert all(
        type(leaf) is torch.Tensor
        for state in saved["state"].values()
        for leaf in state.values()
        if torch.is_tensor(leaf)
    )


def test_states_of_dtensors_stay() -> None:
    model = distributed(MESHES["two"])
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model, MESHES["two"])
    optimizer.step()
    state = optimizer.state_dict()
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(state)
    assert not other._optimizer_load_state_dict_post_hooks and not hasattr(other, "_spmd_places_state")
    assert other.state[model[0].weight]["exp_avg"].spec == model[0].weight.spec  # type: ignore[index]


COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "copy_": lambda x: x.copy_(torch.arange(15.0).view(5, 3)),
    "another dtype": lambda x: x.copy_(torch.arange(15).view(5, 3)),
    "broadcast": lambda x: x.copy_(torch.arange(3.0)),
    "a row": lambda x: x[1].copy_(torch.arange(3.0)),
    "a transpose": lambda x: x.t().copy_(torch.arange(15.0).view(3, 5)),
    "items": lambda x: x.__setitem__(slice(0, 2), torch.ones(2, 3)),
    "a list": lambda x: torch._foreach_copy_([x[0], x[1]], [torch.arange(3.0), torch.ones(3)]),
}


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data"), P(partial={"data": "sum"})], ids=repr)
@pytest.mark.parametrize("name", COPIES)
def test_copies(name: str, spec: P) -> None:
    value = torch.randn(5, 3)
    x = spmd.distribute(value, spec, MESHES["three"])
    before = x.spec
    COPIES[name](x)
    COPIES[name](value)
    torch.testing.assert_close(x.full_tensor(), value)
    assert x.spec == before


def test_a_copy_that_autograd_would_record_is_refused() -> None:
    x = spmd.distribute(torch.zeros(4), P("data"), MESHES["two"])
    with pytest.raises(ShardingError, match=r"a plain tensor f32\[4\] that requires grad"):
        x.copy_(torch.ones(4, requires_grad=True))
    with torch.no_grad():
        x.copy_(torch.ones(4, requires_grad=True))
    assert x.sum() == 4


def test_modules_load_plain_states() -> None:
    for mesh in MESHES.values():
        model, expected = distributed(mesh), plain_model().double()
        backward_input = INPUT.double()
        expected(backward_input)
        specs = [parameter.spec for parameter in model.parameters()]  # type: ignore[attr-defined]
        assert model.load_state_dict(expected.state_dict()) == ([], [])
        assert_same(model, expected.float())
        assert [parameter.spec for parameter in model.parameters()] == specs  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
            model.load_state_dict({**expected.state_dict(), "0.weight": torch.ones(4, 3)})


def _loads(mesh: spmd.Mesh) -> list[Any]:
    model, expected = distributed(mesh), plain_model()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.add_(1)
    model.load_state_dict(expected.state_dict())
    assert_same(model, expected)
    ours, theirs = torch.optim.AdamW(model.parameters(), 0.1), torch.optim.AdamW(expected.parameters(), 0.1)
    backward(expected, None)
    theirs.step()
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    model.load_state_dict(expected.state_dict())
    for held, optimizer, where in ((model, ours, mesh), (expected, theirs, None)):
        optimizer.zero_grad()
        backward(held, where)
        optimizer.step()
    assert_same(model, expected)
    rank, said = spmd.process_index(), []
    other = {name: value + rank for name, value in expected.state_dict().items()}
    state = theirs.state_dict()
    state["state"] = {n: {k: v + rank for k, v in held.items()} for n, held in state["state"].items()}
    x = spmd.distribute(torch.zeros(4), P("data"), mesh)
    calls: list[Callable[[], Any]] = [
        lambda: model.load_state_dict(other),
        lambda: ours.load_state_dict(state),
        lambda: x.copy_(torch.full((4,), 1.0 + rank) * torch.arange(4)),
    ]
    for call in calls:
        try:
            call()
        except (DivergenceError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_loads_on_processes(workers: Workers) -> None:
    for said in workers.run(call_on_mesh, _loads, {"data": 2}, "distributed", ranks=2):
        assert len(said) == 3
        assert "0.weight differs between ranks" in said[0]
        assert "exp_avg of parameter 0 differs between ranks" in said[1]
        assert "The tensor that is copied differs between ranks" in said[2]


def _comparisons(mesh: spmd.Mesh) -> int:
    from spmd.api.eager import plain_copies

    calls, before = [], plain_copies.check_same

    def counted(call: str, *args: Any) -> None:
        calls.append(call)
        before(call, *args)

    plain_copies.check_same = counted
    try:
        distributed(mesh).load_state_dict(plain_model().state_dict())
    finally:
        plain_copies.check_same = before
    return len(calls)


def test_a_load_is_compared_once(workers: Workers) -> None:
    assert workers.run(call_on_mesh, _comparisons, {"data": 2}, "distributed", ranks=2) == [1, 1]


def _scaled(mesh: spmd.Mesh) -> tuple[float, bool]:
    """An infinity in the shard of one rank."""
    model = distributed(mesh)
    before = model[0].weight.full_tensor()  # type: ignore[index]
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(spmd.distribute(INPUT, P("data"), mesh)).square().mean()).backward()
    shard = model[0].weight.grad.to_local().clone()  # type: ignore[index, union-attr]
    if spmd.process_index() == 1:
        shard[0, 0] = float("inf")
    model[0].weight.grad = spmd.DTensor.from_local(shard, mesh, P("data"))  # type: ignore[index, union-attr]
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), bool((model[0].weight.full_tensor() == before).all())  # type: ignore[index]


def test_an_infinity_on_one_rank_skips_the_step_of_all(workers: Workers) -> None:
    assert workers.run(call_on_mesh, _scaled, {"data": 2}, "distributed", ranks=2) == [(4.0, True)] * 2
