"""torch.compile round jitted functions and DTensors breaks its graph there, with the values of one device."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import plain_module_cases as cases
import pytest
import torch
from plain_module_cases import loss_of
from sampling import sample
from torch import nn
from workers import Workers, call_on_mesh

import spmd
from spmd import DTensor, P

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own imports

MESH = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
SPECS = (None, P("x"), P("x"))
X, Y = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.ones(5, 3)

Compile = Callable[..., Any]


@pytest.fixture(params=sample(["eager", "aot_eager"], ["aot_eager"]))
def compiled(request: pytest.FixtureRequest) -> Iterator[Compile]:
    """`torch.compile` by a backend that needs no C++ compiler."""
    torch._dynamo.reset()
    yield lambda f, **options: torch.compile(f, backend=request.param, **options)
    torch._dynamo.reset()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def sharded(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    return spmd.distribute_module(module, MESH, spmd.fsdp_specs(module, "x", min_size=0))


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(loss: torch.Tensor, module: nn.Module, expected: torch.Tensor, alone: nn.Module) -> None:
    """Two losses and their gradients."""
    for value in (loss, expected):
        value.backward()
    torch.testing.assert_close(whole(loss.detach()), expected.detach())
    for one, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(one.grad), other.grad)


@pytest.mark.parametrize("of", [copy.deepcopy, sharded], ids=["plain", "sharded"])
def test_round_a_jitted_function(compiled: Compile, of: Any) -> None:
    alone = network()
    module, f = of(alone), spmd.jit(loss_of, SPECS, mesh=MESH)
    step = compiled(lambda x, y: f(module, x * 2, y * 3) + 1)
    expected = loss_of(alone, X * 2, Y * 3) + 1
    with torch.no_grad():
        torch.testing.assert_close(whole(step(X, Y)), expected.detach())
    check(step(X, Y), module, expected, alone)


def test_a_backward_pass_and_a_step_inside(compiled: Compile) -> None:
    alone = network()
    module, f = copy.deepcopy(alone), spmd.jit(loss_of, SPECS, mesh=MESH)
    found = []
    for side, loss, wrap in ((module, f, compiled), (alone, loss_of, lambda step: step)):
        optimizer = torch.optim.SGD(side.parameters(), lr=0.1)

        def step(x: Any, y: Any, side: Any = side, loss: Any = loss, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            value = loss(side, x, y)
            value.backward()
            optimizer.step()
            return value.detach()

        run = wrap(step)
        found.append([*(whole(run(X, Y)) for _ in range(3)), *(p.detach() for p in side.parameters())])
    torch.testing.assert_close(*found)


def test_a_module_of_dtensors(compiled: Compile) -> None:
    alone = network()
    module, x = sharded(alone), spmd.distribute(X, P("x"), MESH)
    check(compiled(module)(x).square().sum(), module, alone(X).square().sum(), alone)


def test_an_optimizer_of_dtensors(compiled: Compile) -> None:
    alone = network()
    module, x = sharded(alone), spmd.distribute(X, P("x"), MESH)
    for side, given, wrap in ((module, x, compiled), (alone, X, lambda step: step)):
        optimizer = torch.optim.AdamW(side.parameters(), lr=0.1)
        side(given).square().sum().backward()
        wrap(optimizer.step)()
    for one, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(one.detach()), other.detach())


def test_inside_of_jit(compiled: Compile) -> None:
    for wrap in (
        lambda alone: (spmd.jit(compiled(loss_of), SPECS, mesh=MESH), copy.deepcopy(alone)),
        lambda alone: (spmd.jit(loss_of, SPECS, mesh=MESH), compiled(copy.deepcopy(alone))),
    ):
        alone = network()
        f, module = wrap(alone)
        check(f(module, X, Y), module, loss_of(alone, X, Y), alone)


def reads_a_dtensor(x: DTensor) -> Any:
    return x.full_tensor() + x.spec.mesh.size + x.redistribute(P()).sum().item()


CALLS: dict[str, tuple[Any, Any]] = {
    "operators": (lambda x: torch.relu(x) @ x.t() * 2, lambda x: torch.relu(x) @ x.t() * 2),
    "methods": (reads_a_dtensor, lambda x: x + 4 + x.sum()),
    "distribute": (lambda x: spmd.distribute(whole(x) + 1, P("y"), MESH) * 2, lambda x: (x + 1) * 2),
    "factories": (lambda x: x + spmd.ones(4, spec=P("x"), mesh=MESH), lambda x: x + 1),
    "shard_map": (
        spmd.shard_map(lambda x: spmd.collectives.psum(x.sum(), ("x",)), MESH, P("x"), P()),
        lambda x: x.sum(),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_with_dtensors(compiled: Compile, name: str) -> None:
    call, plain = CALLS[name]
    f = compiled(lambda x: call(x) + 0)
    for _ in range(2):
        torch.testing.assert_close(whole(f(spmd.distribute(X, P("x"), MESH))), plain(X))


def test_a_full_graph_is_refused(compiled: Compile) -> None:
    f = spmd.jit(lambda x: x + 1, mesh=MESH)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"put torch\.compile inside of spmd\.jit"):
        compiled(lambda x: f(x * 2), fullgraph=True)(X)


def train_compiled(mesh: spmd.Mesh) -> None:
    alone = network().double()
    module, f = copy.deepcopy(alone), spmd.jit(loss_of, SPECS, mesh=mesh)
    x, y = cases._batch(0)
    step = torch.compile(lambda x, y: f(module, x, y) * 2, backend="eager")
    check(step(x, y), module, loss_of(alone, x, y) * 2, alone)


def test_processes(workers: Workers) -> None:
    workers.run(call_on_mesh, train_compiled, {"x": 2}, "distributed", ranks=2)


@pytest.mark.parametrize("first", ["spmd", "torch._dynamo"])
def test_either_is_imported_first(first: str) -> None:
    second = {"spmd": "torch._dynamo", "torch._dynamo": "spmd"}[first]
    code = f"""
import sys, torch, {first}
assert {first != "spmd"} == ("torch._dynamo" in sys.modules)
import importlib.util
importlib.util.find_spec("torch._dynamo")
import {second}
import spmd
assert spmd.DTensor in torch._dynamo.config.nontraceable_tensor_subclasses
assert not any(type(finder).__module__.startswith("spmd") for finder in sys.meta_path)
f = spmd.jit(lambda x: x + 1, mesh=spmd.make_mesh({{"x": 2}}, runtime="virtual"))
print(torch.compile(lambda x: f(x) * 2, backend="eager")(torch.ones(2)).tolist())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("[4.0, 4.0]\n", "")
