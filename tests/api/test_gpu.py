"""The workload on GPUs, by virtual ranks of one and by NCCL; skipped on machines without."""

import distributed_cases as cases
import pytest
import torch

import layouts
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


def test_a_job_of_one_gpu_sends_by_nccl():
    assert "nccl" == launch(cases.send_to_itself, 1, DEVICE)
