"""The workload on GPUs, by virtual ranks of one and by NCCL; skipped on machines without."""

import distributed_cases as cases
import pytest
import torch

import layouts
import spmd
from spmd import P
from spmd.job.launch import launch

DEVICE, GPUS = "cuda", torch.cuda.device_count()
STEPS = 5

pytestmark = pytest.mark.skipif(GPUS == 0, reason="no GPU")


def losses_on_the_cpu(name, axes):
    return cases.train(name, axes, "virtual", STEPS)[0]


@pytest.mark.parametrize("name", list(layouts.STRATEGIES))
def test_virtual_ranks_on_one_gpu_train_as_on_the_cpu(name):
    axes = layouts.STRATEGIES[name].mesh_of(8)
    losses, *_ = cases.train(name, axes, "virtual", STEPS, DEVICE)
    assert losses_on_the_cpu(name, axes) == pytest.approx(losses, abs=1e-4, rel=0)


@pytest.mark.parametrize("ranks", [ranks for ranks in (1, 2, 4, 8) if ranks <= max(GPUS, 1)])
@pytest.mark.parametrize("name", list(layouts.STRATEGIES))
def test_ranks_on_nccl_train_as_on_the_cpu(name, ranks):
    axes = layouts.STRATEGIES[name].mesh_of(ranks)
    losses, planned, executed, _ = launch(cases.train, ranks, name, axes, "distributed", STEPS, DEVICE)
    assert losses_on_the_cpu(name, axes) == pytest.approx(losses, abs=1e-4, rel=0)
    assert sorted(planned) == sorted(executed)


def test_gradients_outside_of_functions_are_those_of_one_device():
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual", device=DEVICE)
    whole = [torch.randn(7, 5, device=DEVICE), torch.randn(5, 3, device=DEVICE)]
    placed = [spmd.distribute(x, spec, mesh).requires_grad_() for x, spec in zip(whole, (P("x"), P()), strict=True)]
    plain = [x.requires_grad_() for x in whole]
    for x, w in (placed, plain):
        (x @ w).relu().square().sum().backward()
    for ours, theirs in zip(placed, plain, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_a_strided_view_is_traced():
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual", device=DEVICE)
    x = torch.arange(12.0, device=DEVICE)
    windows = spmd.jit(lambda x: x.as_strided((5, 4), (2, 1)), P("x"), P(), mesh=mesh)
    assert windows(x).full_tensor().equal(x.as_strided((5, 4), (2, 1)))


def test_a_job_of_one_gpu_sends_by_nccl():
    assert "nccl" == launch(cases.send_to_itself, 1, DEVICE)
