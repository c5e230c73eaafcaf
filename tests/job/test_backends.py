"""The backends of torch.distributed and the process groups of a mesh of GPUs, with stand-ins for GPUs."""

import pytest
import torch
import torch.distributed as dist

from spmd.collectives.transport import process_groups
from spmd.core.mesh import Mesh, Runtime
from spmd.job import process


@pytest.mark.parametrize(
    ("accelerator", "has_nccl", "expected"),
    [(None, False, "gloo"), ("cuda", True, "cpu:gloo,cuda:nccl"), ("cuda", False, "gloo")],
)
def test_gloo_is_always_there_for_comparisons(monkeypatch, accelerator, has_nccl, expected):
    found = accelerator and torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    assert expected == process._backends()


@pytest.mark.parametrize(("kind", "bound"), [("nccl", torch.device("cuda", 3)), ("gloo", None)])
def test_a_group_of_nccl_is_told_its_gpu(monkeypatch, kind, bound):
    class World:
        def size(self):
            return 4

        def rank(self):
            return 2

    made = {}

    def helper(size, rank, ranks, *rest, **keywords):
        made.update(keywords, ranks=ranks, rank=rank)
        return "group", None

    monkeypatch.setattr(process_groups, "_world", World)
    monkeypatch.setattr(process_groups, "timeout_of", lambda world: None)
    monkeypatch.setattr(process_groups, "backend", lambda mesh: kind)
    monkeypatch.setattr(process_groups, "_made", {})
    monkeypatch.setattr("spmd.core.mesh.process_index", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", helper)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    mesh = Mesh(("data", "model"), (2, 2), Runtime.DISTRIBUTED, torch.device("cuda"))
    assert "group" == process_groups.process_group(mesh, ("model",))
    assert ([2, 3], 0, bound) == (made["ranks"], made["rank"], made["device_id"])
