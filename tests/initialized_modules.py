"""Modules whose initializers write their tensors in all the ways that modules do, and what processes make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from construction_cases import peak_of, shard_bytes
from torch import nn

import spmd
from spmd import P


class Initialized(nn.Module):
    """Parameters of 7 by 6 and buffers, each written in another way; but for `cut`, `torch.manual_seed` gives them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "data_of", "sliced", "square", "cut"):
            setattr(self, name, nn.Parameter(torch.empty(7, 7 if name == "square" else 6)))
        self.low = nn.Parameter(torch.empty(7, 6, dtype=torch.bfloat16), requires_grad=False)
        self.tied = self.weight
        self.register_buffer("inv_freq", torch.empty(3), persistent=False)
        self.register_buffer("table", torch.empty(7, 6))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        nn.init.orthogonal_(self.square)
        self.data_of.data = torch.randn(7, 6) * 0.5
        with torch.no_grad():
            self.sliced[:3].normal_(0, 0.1)
            self.sliced[3:, :2].uniform_(-1, 1)
            self.sliced[3:, 2:].zero_()
            self.sliced.data[0].fill_(2)
            self.low.normal_()
            self.inv_freq.copy_(1 / (10000 ** (torch.arange(0, 6, 2).float() / 6)))
            self.table = torch.outer(torch.arange(7.0), torch.arange(6.0)).cos()
            self.count.zero_()
        self.write_last()

    def write_last(self) -> None:
        nn.init.normal_(self.cut)


class Truncated(Initialized):
    """One that draws a truncated distribution, for which torch's generator draws until all numbers are in range."""

    def write_last(self) -> None:
        nn.init.trunc_normal_(self.cut, std=0.02, a=-0.04, b=0.03)


def layers() -> nn.Module:
    """Layers of torch.nn, with buffers, and with one tensor under two names."""
    made = nn.Sequential(
        nn.Embedding(7, 6, padding_idx=1), nn.Linear(6, 7), nn.BatchNorm1d(7), nn.LSTM(6, 7), nn.Conv2d(3, 6, 3),
        nn.MultiheadAttention(6, 2), nn.LayerNorm(7), nn.GroupNorm(2, 6), nn.PReLU(), nn.Bilinear(2, 3, 7),
        nn.Linear(6, 7, bias=False),
    )  # fmt: skip
    made[-1].weight = made[0].weight
    return made


MODELS: dict[str, Callable[[], nn.Module]] = {"initialized": Initialized, "truncated": Truncated, "layers": layers}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def specs_for(module: nn.Module, dims: P) -> dict[str, P]:
    """The leading dims of a spec, for each tensor as many as it has."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: P(*dims.dims[: x.ndim]) for name, x in tensors}


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The values of all parameters and buffers; those of tied ones by each name."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: (x.full_tensor() if isinstance(x, spmd.DTensor) else x).detach() for name, x in named}


def assert_equal(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    assert [] == [name for name, x in expected.items() if not torch.equal(x, found[name])]


def materialized(make: Callable[[], nn.Module], dims: P, mesh: spmd.Mesh, **options: Any) -> nn.Module:
    """A module on a mesh, whose numbers are those after a seed."""
    module = on_meta(make)
    torch.manual_seed(3)
    return spmd.materialize(module, specs_for(module, dims), mesh, **options)


def states_by_both(dims: P, mesh: spmd.Mesh) -> list[dict[str, torch.Tensor]]:
    """The values that a mesh makes, by keys and by torch's generator."""
    made = [materialized(make, dims, mesh) for make in (Truncated, layers)]
    return [*map(state, made), state(materialized(Initialized, dims, mesh, rng="torch"))]


def errors_on_processes(mesh: spmd.Mesh) -> dict[str, str]:
    """What ranks say to seeds that differ, to modules that differ, and to a failure of one."""
    rank = spmd.process_index()

    def message(module: nn.Module, **options: Any) -> str:
        try:
            spmd.materialize(module, {}, mesh, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def fail(module: nn.Module) -> None:
        module.reset_parameters()
        if rank == 1:
            raise spmd.ShardingError("on rank 1")

    torch.manual_seed(rank)
    seeds = message(on_meta(lambda: nn.Linear(2, 3)))
    torch.manual_seed(0)
    shapes = message(on_meta(lambda: nn.Linear(2, 3 + (rank == 2))))
    return {"seeds": seeds, "shapes": shapes, "failure": message(on_meta(lambda: nn.Linear(2, 3)), init=fail)}


def memory(rng: str) -> tuple[int, int]:
    """The peak beside what was there before, and the bytes of the shards and the largest parameter."""
    mesh = spmd.make_mesh({"x": 4})
    torch.manual_seed(0)
    spmd.materialize(on_meta(lambda: nn.Linear(2, 2)), {}, mesh)  # process groups
    module = on_meta(lambda: nn.Sequential(nn.Embedding(16_000, 1024), *(nn.Linear(1024, 4096) for _ in range(12))))
    peak, _ = peak_of(lambda: spmd.materialize(module, spmd.fsdp_specs(module, "x"), mesh, rng=rng))
    parameters = list(module.parameters())
    return peak, shard_bytes(parameters) + max(x.nbytes for x in parameters)
