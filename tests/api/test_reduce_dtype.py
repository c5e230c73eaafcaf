"""`jit(..., reduce_dtype=)`: the dtype of sums over ranks."""

import re

import pytest
import torch

import spmd
from spmd import P
from spmd.collectives.traffic import record_traffic
from spmd.errors import PlanError
from spmd.optim import adamw, master_weights

MESH = spmd.make_mesh({"x": 4}, runtime="virtual")
GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")


def brain(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def product(x, w):
    return x @ w


def summed(x, w, parts, dtype):
    """The product with its contracted dim in chunks, as ranks compute it, summed in a dtype."""
    chunks = zip(x.chunk(parts, 1), w.chunk(parts, 0), strict=True)
    return torch.stack([(a @ b).to(dtype) for a, b in chunks]).sum(0).bfloat16()


@pytest.mark.parametrize("out", [P(), P("x"), P(None, "x")])
@pytest.mark.parametrize("width", [8, 6])
def test_sums_are_rounded_once(out, width):
    x, w = brain(5, 16), brain(16, width, seed=1)
    step = spmd.jit(product, (P(None, "x"), P("x")), out, mesh=MESH, reduce_dtype=torch.float32)
    with record_traffic() as traffic:
        result = step(x, w).full_tensor()
    torch.testing.assert_close(result, summed(x, w, 4, torch.float32), rtol=0, atol=0)
    assert result.dtype == torch.bfloat16
    ran = [(transfer.kind, max(transfer.sent)) for transfer in traffic.transfers]
    assert ran == [(comm.kind, comm.bytes) for comm in step.plan(x, w).comms]
    own = spmd.jit(product, (P(None, "x"), P("x")), out, mesh=MESH)
    assert ran == [(comm.kind, 2 * comm.bytes) for comm in own.plan(x, w).comms]
    assert not torch.equal(own(x, w).full_tensor(), result)


def test_other_values_are_reduced_as_they_are():
    wide, counts = torch.randn(8, 6, dtype=torch.float64), torch.arange(8)

    def function(wide, counts, x):
        return wide.sum(0), counts.sum(), x.amax(0)

    args = wide, counts, brain(8, 6)
    step = spmd.jit(function, P("x"), P(), mesh=MESH, reduce_dtype=torch.float32)
    assert "to_copy" not in step.lower(*args).as_text()
    torch.testing.assert_close([leaf.full_tensor() for leaf in step(*args)], list(function(*args)))


def test_the_steps_of_one_redistribution_stay_wide():
    x, w = brain(4, 16), brain(16, 8, seed=1)

    def function(x, w):
        return spmd.reshard(spmd.constrain(x @ w, P(partial={"x": "sum", "y": "sum"})), P("y"))

    step = spmd.jit(function, (P(None, ("x", "y")), P(("x", "y"))), P("y"), mesh=GRID, reduce_dtype=torch.float32)
    torch.testing.assert_close(step(x, w).full_tensor(), summed(x, w, 4, torch.float32), rtol=0, atol=0)
    text = step.lower(x, w).as_text()
    assert 2 == text.count("to_copy(")
    assert 2 <= len(step.plan(x, w).comms)


def test_a_sum_that_is_cast_anyway_is_cast_before_it():
    def function(x, w):
        return (x @ w).float()

    x, w = brain(8, 16), brain(16, 8, seed=1)
    step = spmd.jit(function, (P(None, "x"), P("x")), P("x"), mesh=MESH, reduce_dtype=torch.float32)
    assert 1 == step.lower(x, w).as_text().count("to_copy(")
    expected = torch.stack([(a @ b).float() for a, b in zip(x.chunk(4, 1), w.chunk(4, 0), strict=True)]).sum(0)
    torch.testing.assert_close(step(x, w).full_tensor(), expected)


def test_operators_that_sum_over_ranks_themselves():
    def function(x):
        return x.logsumexp(1)

    x = brain(5, 30)
    step = spmd.jit(function, P(None, "x"), P(), mesh=MESH, machine=spmd.Machine(latency=0), reduce_dtype=torch.float32)
    assert re.search(r"to_copy\(\w+, dtype=torch.float32\).*\n.*all_reduce\(\w+, 'sum'", step.lower(x).as_text())
    with record_traffic() as traffic:
        result = step(x).full_tensor()
    torch.testing.assert_close(result, function(x))
    ran = [(transfer.kind, max(transfer.sent)) for transfer in traffic.transfers]
    assert ran == [(comm.kind, comm.bytes) for comm in step.plan(x).comms]
    assert traffic.transfers


def test_gradients_from_outside_are_reduced_in_it():
    x, w = brain(16, 5), brain(5, 8, seed=1)
    step = spmd.jit(product, (P("x"), P()), P("x"), mesh=MESH, reduce_dtype=torch.float32)
    held = spmd.distribute(w, P(), MESH).requires_grad_()
    step(x, held).sum().backward()
    torch.testing.assert_close(
        held.grad.full_tensor(), summed(x.mT, torch.ones(16, 8).bfloat16(), 4, torch.float32), rtol=0, atol=0
    )


def test_a_saved_plan_is_for_its_reduce_dtype(tmp_path):
    x, w, path = brain(4, 16), brain(16, 8, seed=1), tmp_path / "plan.json"

    def jitted(**options):
        return spmd.jit(product, (P(None, "x"), P("x")), P(), mesh=MESH, **options)

    jitted(reduce_dtype=torch.float32).plan(x, w).save(path)
    again = jitted(reduce_dtype=torch.float32, plan=path)
    torch.testing.assert_close(again(x, w).full_tensor(), summed(x, w, 4, torch.float32), rtol=0, atol=0)
    with pytest.raises(PlanError, match=r"reduce_dtype is None here and torch\.float32 in the plan"):
        jitted(plan=path)(x, w)


@pytest.mark.parametrize("dtype", [torch.int32, "float32", torch.complex64])
def test_a_reduce_dtype_is_a_floating_dtype(dtype):
    with pytest.raises(PlanError, match="reduce_dtype must be a floating dtype"):
        spmd.jit(product, P(), P(), mesh=MESH, reduce_dtype=dtype)


@pytest.mark.parametrize("spec", [P(), P("x")])
def test_training_with_master_weights(spec):
    optimizer = master_weights(adamw(1e-2))

    def step(params, state, x):
        grads = torch.func.grad(lambda w: (x @ w).float().square().mean())(params)
        return optimizer.step(params, state, grads)

    x, params = brain(16, 6), brain(6, 4, seed=1)
    jitted = spmd.jit(step, (spec, P(), P("x")), (spec, P()), mesh=MESH, reduce_dtype=torch.float32)
    expected = held = params, optimizer.init(params)
    for _ in range(4):
        expected, held = step(*expected, x), jitted(*held, x)
    torch.testing.assert_close(held[0].full_tensor(), expected[0])
    assert held[0].dtype == torch.bfloat16
    torch.testing.assert_close(held[1].params.full_tensor(), expected[1].params, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("out", [P(), P("x")])
def test_casts_are_predicted(out):
    machine = spmd.Machine(memory_bandwidth=1e6)
    options = {"machine": machine, "mesh": MESH, "reduce_dtype": torch.float32}
    step = spmd.jit(lambda x: x, P(partial={"x": "sum"}), out, **options)
    plan = step.plan(brain(64, 32))
    results = 64 * 32 // (1 if out == P() else 4)
    casts = (64 * 32 + results) * (2 + 4) / 1e6
    assert plan.seconds == pytest.approx(casts + sum(comm.seconds for comm in plan.comms))
