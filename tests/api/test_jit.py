"""`jit` end to end: values against one device, its stages, its cache, nesting."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import DTensor, DTensorSpec, P, Partial, Replicate, Shard, TensorMeta
from spmd.collectives import psum
from spmd.collectives.traffic import record_traffic
from spmd.inspect.plan import Plan
from spmd.lowering.lower import LocalProgram
from spmd.lowering.verify import verify
from spmd.rules import RULES, Rule, factors
from spmd.tracing.traced import Traced


def mesh_of(**axes: int) -> spmd.Mesh:
    return spmd.make_mesh(axes, runtime="virtual")


def close(actual: Any, expected: Any) -> None:
    leaves, expected_leaves = spmd.core.pytree.tree_leaves(actual), spmd.core.pytree.tree_leaves(expected)
    assert len(leaves) == len(expected_leaves)
    for leaf, truth in zip(leaves, expected_leaves, strict=True):
        assert isinstance(leaf, DTensor)
        torch.testing.assert_close(leaf.full_tensor(), truth)


def mlp(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(F.linear(x, params["w1"], params["b1"]), approximate="tanh")
    return F.linear(hidden, params["w2"])


def sgd_step(params: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    grads, loss = torch.func.grad_and_value(lambda p: mlp(p, x).square().mean())(params)
    names = sorted(params)
    updated = torch._foreach_sub([params[n] for n in names], torch._foreach_mul([grads[n] for n in names], 0.1))
    return dict(zip(names, updated, strict=True)), loss


def parameters() -> dict[str, torch.Tensor]:
    return {"w1": torch.randn(12, 6), "b1": torch.randn(12), "w2": torch.randn(4, 12)}


LAYOUTS = {
    "dp": (P(), P("data")),
    "fsdp": ({"w1": P("data"), "b1": P("data"), "w2": P("data")}, P("data")),
    "tp": ({"w1": P("model"), "b1": P("model"), "w2": P(None, "model")}, P()),
    "dp_tp": ({"w1": P("model"), "b1": P("model"), "w2": P(None, "model")}, P("data")),
    "both": ({"w1": P(("model", "data")), "b1": P(), "w2": P("data", "model")}, P(("data", "model"))),
}


SLOW_RANKS = spmd.Machine(flops=1e9, memory_bandwidth=1e8, latency=0.0)
"""A machine on which it pays to shard even small tensors."""


@pytest.mark.parametrize("axes", [{"data": 1, "model": 1}, {"data": 2, "model": 2}, {"data": 3, "model": 2}])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("machine", [None, SLOW_RANKS], ids=["default", "slow"])
def test_training_step_equals_one_device(axes: dict[str, int], layout: str, machine: spmd.Machine | None) -> None:
    params, (param_specs, x_spec) = parameters(), LAYOUTS[layout]
    step = spmd.jit((param_specs, x_spec), (param_specs, P()), mesh=mesh_of(**axes), machine=machine)(sgd_step)
    x = torch.randn(7, 6)
    verify(step.lower(params, x))
    state, expected = params, params
    for _ in range(3):
        state, loss = step(state, x)
        expected, expected_loss = sgd_step(expected, x)
        close(state, expected)
        assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)


def test_decorator_and_call_forms_agree() -> None:
    mesh = mesh_of(data=2)
    f = lambda x: x.sin()  # noqa: E731
    x = torch.randn(4)
    forms = [
        spmd.jit(P("data"), P("data"), mesh=mesh)(f),
        spmd.jit(f, P("data"), P("data"), mesh=mesh),
        spmd.jit(f, in_specs=P("data"), out_specs=P("data"), mesh=mesh),
        spmd.jit(in_specs=P("data"), out_specs=P("data"), mesh=mesh)(f),
        spmd.jit(f, (Shard(0),), (Shard(0),), mesh=mesh),
        spmd.jit(f, ((Shard(0),),), [Shard(0)], mesh=mesh),
    ]
    for form in forms:
        close(form(x), x.sin())


def test_metadata_of_the_function_is_kept() -> None:
    @spmd.jit(P(), P(), mesh=mesh_of(data=2))
    def normalise(x: torch.Tensor) -> torch.Tensor:
        """Divide by the norm."""
        return x / x.norm()

    assert (normalise.__name__, normalise.__doc__) == ("normalise", "Divide by the norm.")
    assert repr(normalise).endswith("normalise)")
    assert normalise.lower(torch.ones(2)).name == "normalise"


def test_one_trace_for_each_signature() -> None:
    traces = []

    def f(x: torch.Tensor, power: int) -> torch.Tensor:
        traces.append((tuple(x.shape), power))
        return x**power

    g = spmd.jit(f, P("data"), P("data"), mesh=mesh_of(data=2), static_argnums=1)
    for x, power in [
        (torch.ones(4), 2),
        (torch.ones(4), 2),
        (torch.ones(4), 3),
        (torch.ones(6), 2),
        (torch.ones(4), 2),
    ]:
        close(g(x, power), x**power)
    g.trace(torch.ones(4), 3), g.plan(torch.ones(4), 3), g.lower(torch.ones(4), 3)
    assert traces == [((4,), 2), ((4,), 3), ((6,), 2)]


def test_a_dtensor_and_a_plain_tensor_share_a_trace() -> None:
    traces = []

    def f(x: torch.Tensor) -> torch.Tensor:
        traces.append(1)
        return x + 1

    mesh = mesh_of(data=2)
    g = spmd.jit(f, P("data"), P("data"), mesh=mesh)
    y = g(g(torch.zeros(4)))
    y = g(spmd.distribute(y.full_tensor(), P("data"), mesh))
    assert torch.equal(y.full_tensor(), torch.full((4,), 3.0))
    assert len(traces) == 1


@pytest.mark.parametrize("static", [1, True, 1.0])
def test_static_arguments_of_equal_value_but_other_type_are_other_signatures(static: object) -> None:
    seen = []

    def f(x: torch.Tensor, flag: object) -> torch.Tensor:
        seen.append(flag)
        return x + 1

    g = spmd.jit(f, P(), P(), mesh=mesh_of(data=2), static_argnums=(-1,))
    for value in (1, True, 1.0):
        g(torch.ones(2), value)
    g(torch.ones(2), static)
    assert [type(value) for value in seen] == [int, bool, float]


def test_results_have_out_specs() -> None:
    mesh = mesh_of(data=2, model=2)
    f = spmd.jit(lambda x: {"a": x + 1, "b": [x.sum(), None]}, P("data"), {"a": P(None, "model"), "b": P()}, mesh=mesh)
    result = f(torch.ones(4, 4))
    assert result["a"].spec == DTensorSpec.make(mesh, P(None, "model"), TensorMeta((4, 4), torch.float32))
    assert result["b"][0].placements == (Replicate(), Replicate())
    assert result["b"][1] is None
    assert [tuple(shard.shape) for shard in result["a"].shards] == [(4, 2)] * 4


def test_partial_in_and_out() -> None:
    mesh = mesh_of(data=2)
    f = spmd.jit(lambda x: x * 2, P(partial={"data": "sum"}), P(partial={"data": "sum"}), mesh=mesh, comms="error")
    result = f(torch.ones(3))
    assert result.placements == (Partial("sum"),)
    assert torch.equal(result.full_tensor(), torch.full((3,), 2.0))


def test_any_pytree_of_state() -> None:
    State = namedtuple("State", ["weights", "count"])

    def step(state: Any, x: torch.Tensor) -> Any:
        return State([w + x.sum() for w in state.weights], state.count + 1)

    f = spmd.jit((State(P("data"), P()), P()), State([P("data"), P("data")], P()), mesh=mesh_of(data=2))(step)
    result = f(State([torch.zeros(4), torch.ones(4)], torch.tensor(0)), torch.ones(2))
    assert type(result) is State
    assert torch.equal(result.weights[1].full_tensor(), torch.full((4,), 3.0))
    assert result.count.item() == 1


def test_a_module_through_functional_call() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    state = dict(module.named_parameters())

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, params, (x,)).square().sum()

    f = spmd.jit((P(), P("data")), P(), mesh=mesh_of(data=2))(torch.func.grad(loss))
    x = torch.randn(5, 6)
    close(f(state, x), torch.func.grad(loss)({k: v.detach() for k, v in state.items()}, x))
    close(f(state, x), torch.func.grad(loss)({k: v.detach() for k, v in state.items()}, x))


def test_closed_over_tensors_are_constants() -> None:
    table = torch.randn(4, 3)
    f = spmd.jit(lambda x: x + table, P("data"), P("data"), mesh=mesh_of(data=3))
    close(f(torch.ones(4, 3)), 1 + table)


def test_stages() -> None:
    f = spmd.jit(lambda x, w: x @ w, (P("data"), P()), P("data"), mesh=mesh_of(data=2))
    args = TensorMeta((4, 6), torch.float32), torch.empty(6, 5, device="meta")
    assert isinstance(f.trace(*args), Traced)
    assert isinstance(f.plan(*args), Plan)
    program = verify(f.lower(*args))
    assert isinstance(program, LocalProgram)
    assert [spec.pspec for spec in program.input_specs] == [P("data"), P()]
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    compiled = f.compile(x, w)
    close(compiled(x, w), x @ w)
    with pytest.raises(spmd.TraceError, match=r"Compiled for arguments .* Call the jitted function instead"):
        compiled(x, {"w": w})


def test_abstract_meshes_are_planned_and_not_run() -> None:
    mesh = spmd.make_mesh({"data": 256, "model": 256}, runtime="abstract")
    f = spmd.jit(lambda x, w: x @ w, (P("data"), P(None, "model")), P("data", "model"), mesh=mesh, comms="error")
    args = TensorMeta((1024, 64), torch.float32), TensorMeta((64, 512), torch.float32)
    assert "mm_1 = mm(x, w)  # f32[4,2] P('data', 'model')" in f.lower(*args).as_text()
    with pytest.raises(spmd.MeshError, match=r"Mesh\(data=256, model=256\) is abstract: .* planned and lowered"):
        f(torch.ones(1024, 64), torch.ones(64, 512))


def test_the_default_mesh_is_looked_up_at_each_call() -> None:
    f = spmd.jit(lambda x: x + 1, P("data"), P("data"))
    for size in (1, 2, 4):
        with spmd.use_mesh(mesh_of(data=size)):
            assert len(f(torch.ones(4)).shards) == size


def test_nested_functions_are_inlined() -> None:
    mesh = mesh_of(data=2, model=2)
    traces = []

    @spmd.jit(P(None, "model"), P("data"))
    def inner(x: torch.Tensor) -> torch.Tensor:
        traces.append(1)
        return x * 2

    @spmd.jit(P("data"), P("data"), mesh=mesh)
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x.sin()) + 1

    x = torch.randn(4, 4)
    close(outer(x), x.sin() * 2 + 1)
    close(outer(x), x.sin() * 2 + 1)
    assert len(traces) == 1
    kinds = {collective.kind for collective in outer.lower(x).collectives}
    assert "all_to_all" in kinds or "all_gather" in kinds


def test_a_nested_function_is_differentiated_and_batched() -> None:
    mesh = mesh_of(data=2)

    @spmd.jit((P(), P("data")), P(), mesh=mesh)
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w).square().sum()

    plain = lambda w, x: (x @ w).square().sum()  # noqa: E731
    w, x, ws = torch.randn(3), torch.randn(4, 3), torch.randn(2, 3)
    grad = spmd.jit(torch.func.grad(loss), (P(), P("data")), P(), mesh=mesh)
    close(grad(w, x), torch.func.grad(plain)(w, x))
    batched = spmd.jit(torch.func.vmap(loss, (0, None)), (P(), P("data")), P(), mesh=mesh)
    close(batched(ws, x), torch.func.vmap(plain, (0, None))(ws, x))


def test_constraints_hold() -> None:
    mesh = mesh_of(data=2)

    def f(x: torch.Tensor) -> torch.Tensor:
        return spmd.constrain(x + 1, P()).sin()

    g = spmd.jit(f, P("data"), P("data"), mesh=mesh)
    x = torch.randn(4, 3)
    close(g(x), (x + 1).sin())
    assert g.lower(x).count() == {"all_gather": 1}


def test_arguments_are_not_kept_alive() -> None:
    f = spmd.jit(lambda x: x + 1, P("data"), P("data"), mesh=mesh_of(data=2))
    x = torch.ones(4)
    f(x)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_results_of_tensors_that_require_grad_require_it() -> None:
    f = spmd.jit(lambda x: x * 2, P("data"), P("data"), mesh=mesh_of(data=2))
    for _ in range(2):
        result = f(torch.ones(4, requires_grad=True))
        assert result.requires_grad
        assert [shard.requires_grad for shard in result.shards] == [False, False]


def test_arguments_and_results_may_be_nothing() -> None:
    mesh = mesh_of(data=2)
    assert spmd.jit(lambda: None, (), None, mesh=mesh)() is None
    assert torch.equal(spmd.jit(lambda: torch.ones(2), (), P(), mesh=mesh)().full_tensor(), torch.ones(2))


def test_communication_is_counted() -> None:
    mesh = mesh_of(data=4)
    f = spmd.jit(lambda x: x.sum(), P("data"), P(), mesh=mesh)
    (comm,) = f.lower(torch.ones(8)).collectives
    assert (comm.kind, comm.axes, comm.bytes) == ("all_reduce", ("data",), 2 * 4)  # one block of four is full
    assert [(c.kind, c.axes, c.bytes) for c in f.plan(torch.ones(8)).comms] == [(comm.kind, comm.axes, comm.bytes)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_programs_send_what_their_plans_say(layout: str) -> None:
    specs, mesh = LAYOUTS[layout], mesh_of(data=2, model=2)
    step = spmd.jit(specs, (specs[0], P()), mesh=mesh, machine=SLOW_RANKS)(sgd_step)
    args = parameters(), torch.randn(8, 6)
    planned = sorted((comm.kind, comm.axes, comm.bytes) for comm in step.plan(*args).comms)
    assert sorted((comm.kind, comm.axes, comm.bytes) for comm in step.lower(*args).collectives) == planned
    with record_traffic() as traffic:
        step(*args)
    assert sum(max(transfer.sent) for transfer in traffic.transfers) == sum(sent for _, _, sent in planned)


def test_rules_can_be_added() -> None:
    op = torch.ops.aten.sin.default
    without = {key: rule for key, rule in spmd.rules.RULES.items() if key is not op}
    assert spmd.jit(torch.sin, P("data"), P("data"), mesh=mesh_of(data=2), rules=without)(torch.ones(4)).shape == (4,)


def test_specs_of_results_that_torch_names() -> None:
    f = spmd.jit(lambda x: x.sort(0), P("data"), (P("data"), P()), mesh=mesh_of(data=2))
    x = torch.randn(5)
    close(f(x), x.sort(0))
    assert ["values", "indices"] == [name for name in ("values", "indices") if hasattr(f(x), name)]


def test_inverses() -> None:
    x = torch.randn(4, 4) + 4 * torch.eye(4)
    f = spmd.jit(torch.linalg.inv, P("data"), P("data"), mesh=mesh_of(data=2))
    close(f(x), torch.linalg.inv(x))


def test_complex_factors() -> None:
    x = torch.randn(4, 3, dtype=torch.complex64)
    f = spmd.jit(lambda x: x * 2j, P("data"), P("data"), mesh=mesh_of(data=2), comms="error")
    close(f(x), x * 2j)


def test_shards_of_one_constant_that_turn_out_alike() -> None:
    f = spmd.jit(
        lambda x, y: (x + torch.full((4,), 2.0), y + torch.full((4,), 2.0)),
        (P("data"), P("model")),
        (P("data"), P("model")),
        mesh=mesh_of(data=2, model=2),
        comms="error",
    )
    x, y = torch.randn(4), torch.randn(4)
    verify(f.lower(x, y))
    close(f(x, y), (x + 2, y + 2))


def test_a_collective_that_one_rank_has_no_use_for_is_taken_all_the_same():
    def body(axes, call, x):
        total = psum(x.sum(), axes)
        return x.sin() if x.shape[0] < 2 else x.sin() + total * 0

    plain = factors("a -> a")
    rule = Rule(lambda call: attrs.evolve(plain.factorize(call), bodies={"a": body}))
    mesh = spmd.make_mesh({"m": 2}, runtime="virtual")
    x = torch.arange(3.0)
    f = spmd.jit(torch.sin, P("m"), P("m"), mesh=mesh, rules=RULES | {torch.ops.aten.sin.default: rule})
    assert torch.equal(x.sin(), f(x).full_tensor())
    assert {"all_reduce": 1} == verify(f.lower(x)).count()
