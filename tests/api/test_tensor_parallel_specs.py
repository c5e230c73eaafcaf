"""Tensor-parallel specs: what is found in models, and that plans with them sum as Megatron-LM does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import spmd
from spmd import P, ShardingError, TensorMeta
from spmd.errors import MeshError

MESHES = {ranks: spmd.make_mesh({"model": ranks}, runtime="virtual") for ranks in (2, 4)}
COLUMN, ROW, WHOLE = P("model"), P(None, "model"), P()


class Attention(nn.Module):
    """Attention with fewer heads of keys and values than of queries, or with q, k and v in one weight."""

    def __init__(self, heads: int = 4, groups: int = 2, packed: bool = False) -> None:
        super().__init__()
        self.heads, self.groups, self.packed = heads, groups, packed
        if packed:
            self.qkv = nn.Linear(8, 3 * heads * 2)
        else:
            self.q, self.k, self.v = nn.Linear(8, heads * 2), nn.Linear(8, groups * 2), nn.Linear(8, groups * 2)
        self.out = nn.Linear(heads * 2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1) if self.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(self.heads // part.shape[1], 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.RMSNorm(8)])
        self.attention = Attention(**options)
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Two layers, learned positions, and a head that is tied to the embedding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 8), nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(**options) for _ in range(2)])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight
        self.unused = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x), "cache": None}


TOKENS = torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(0))
MLP = {"gate": COLUMN, "up": COLUMN, "down": ROW}
HEADS = {"attention.q": COLUMN, "attention.k": COLUMN, "attention.v": COLUMN, "attention.out": ROW}


def expected(module: nn.Module, sharded: dict[str, P]) -> dict[str, P]:
    """The specs of weights by the names of layers, with biases sharded as the columns of their weights."""
    found = dict.fromkeys(dict(module.named_parameters()), WHOLE)
    for name in found:
        layer, _, kind = name.rpartition(".")
        spec = sharded.get(layer.removeprefix("blocks.0.").removeprefix("blocks.1."), WHOLE)
        found[name] = spec if kind == "weight" or spec == COLUMN else WHOLE
    return found


@pytest.mark.parametrize(
    ("options", "ranks", "sharded", "sums"),
    [
        ({}, 2, HEADS | MLP, 5),
        ({}, 4, MLP, 3),  # two heads of keys on four ranks
        ({"groups": 4}, 4, HEADS | MLP, 5),
        ({"groups": 1}, 4, {"attention.q": COLUMN, "attention.out": ROW} | MLP, 5),
        ({"packed": True}, 2, {"attention.out": ROW} | MLP, 5),
    ],
)
def test_decoders(options: dict[str, Any], ranks: int, sharded: dict[str, P], sums: int) -> None:
    module, mesh = Decoder(**options).double(), MESHES[ranks]
    layout = spmd.tensor_parallel_specs(module, "model", (TOKENS,), mesh=mesh)
    assert expected(module, sharded | {"tokens": COLUMN}) == layout
    check(module, layout, (TOKENS,), {}, mesh, sums)


def check(module: nn.Module, layout: Any, args: Any, kwargs: Any, mesh: spmd.Mesh, sums: int | None) -> None:
    """Check values and gradients against one device, and the number of sums over ranks in a forward pass."""
    state = {name: value.detach() for name, value in module.named_parameters()}
    buffers = dict(module.named_buffers())
    specs = ({name: layout[name] for name in state}, {name: layout[name] for name in buffers}, P(), P())

    def logits(state: Any, buffers: Any, args: Any, kwargs: Any) -> torch.Tensor:
        found = functional_call(module, {**state, **buffers}, args, kwargs)
        return found if isinstance(found, torch.Tensor) else found["logits"]

    def step(*given: Any) -> Any:
        return torch.func.grad_and_value(lambda *given: logits(*given).square().mean())(*given)

    keep = {0: "model"}  # these models are so small that gathering their weights is faster
    forward = spmd.jit(logits, specs, mesh=mesh, keep_sharded=keep)
    given = (state, buffers, args, kwargs)
    torch.testing.assert_close(spmd.full_tree(forward(*given)), logits(*given))
    if sums is not None:
        assert {"all_reduce": sums} == dict(forward.lower(*given).count())
    trained = spmd.jit(step, specs, (specs[0], P()), mesh=mesh)
    torch.testing.assert_close(spmd.full_tree(trained(*given)), step(*given))


def test_large_models_need_no_hint() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x + self.last(F.gelu(self.first(x))), (1024,))

    with torch.device("meta"):
        module, x = Layers(), torch.empty(64, 1024)
    layout = spmd.tensor_parallel_specs(module, "model", (x,), mesh=MESHES[4])
    assert {"first.weight": COLUMN, "first.bias": COLUMN, "last.weight": ROW, "last.bias": WHOLE} == layout
    state = dict(module.named_parameters())
    program = spmd.jit(lambda state, x: functional_call(module, state, x), (layout, P()), P(), mesh=MESHES[4])
    assert {"all_reduce": 1} == dict(program.lower(state, x).count())


def test_features_that_exclude_each_other() -> None:
    chain = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8, bias=False), nn.ReLU())])
    layout = spmd.tensor_parallel_specs(chain, "model", (TensorMeta((3, 8), torch.float32),), mesh=MESHES[2])
    assert [COLUMN, ROW, COLUMN, ROW] == list(layout.values())


def test_a_residual_stream_without_norms_stays_whole() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(16, 8)
            self.ups = nn.ModuleList([nn.Linear(8, 12) for _ in range(2)])
            self.downs = nn.ModuleList([nn.Linear(12, 8) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.tokens(x)
            for up, down in zip(self.ups, self.downs, strict=True):
                x = x + down(up(x).relu())
            return x

    layout = spmd.tensor_parallel_specs(Residual(), "model", (TOKENS,), mesh=MESHES[2])
    assert COLUMN == layout["ups.0.weight"] == layout["ups.1.weight"] == layout["tokens.weight"]
    assert ROW == layout["downs.0.weight"] == layout["downs.1.weight"]


def test_uneven_hidden_units_and_buffers() -> None:
    module = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 4), nn.LayerNorm(4)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    layout = spmd.tensor_parallel_specs(module, "model", (x,), mesh=MESHES[2])
    assert [COLUMN] * 2 == [layout["1.running_mean"], layout["0.weight"]] and WHOLE == layout["1.num_batches_tracked"]
    check(module.eval(), layout, (x,), {}, MESHES[2], None)


def test_an_image_of_one_pixel() -> None:
    layers = nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 2, stride=2), nn.Conv2d(4, 4, 1)
    specs = spmd.tensor_parallel_specs(
        nn.Sequential(*layers), "model", (TensorMeta((2, 4, 2, 2), torch.float32),), mesh=MESHES[2]
    )
    assert specs["0.weight"] == COLUMN and specs["2.weight"] == ROW


def test_the_table_says_why() -> None:
    shown: list[str] = []
    spmd.tensor_parallel_specs(Decoder(), "model", (TOKENS,), mesh=MESHES[4], show=shown.append)
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in shown[0].splitlines()}
    refused = "has 2 parts that are used as one, which 4 ranks do not divide"
    assert f"f32[8,8] P() whole: dim 0 {refused}" == lines["blocks.0.attention.q.weight"]
    assert f"f32[8,8] P() whole: dim 1 {refused}" == lines["blocks.0.attention.out.weight"]
    assert "f32[12,8] P('model') column parallel: 12 parts" == lines["blocks.0.gate.weight"]
    assert lines["blocks.0.down.weight"].startswith(
        "f32[8,12] P(None, 'model') row parallel: summed at test_tensor_par"
    )
    assert lines["tokens.weight"].startswith("f32[16,8] P('model') rows looked up at test_tensor_par")
    assert "is looked up by fixed indices by embedding at" in lines["positions.weight"]
    assert "f32[4,4] P() whole: dim 0 is not used" == lines["unused.weight"]


def test_one_spec_for_two_axes() -> None:
    module, mesh = Decoder(), spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
    layout = spmd.tensor_parallel_specs(module, "model", (TOKENS,), mesh=mesh)
    both = spmd.fsdp_specs(module, "data", base=layout, min_size=9, mesh=mesh)
    assert P("model", "data") == both["blocks.0.gate.weight"] and P("data", "model") == both["blocks.0.down.weight"]


@pytest.mark.parametrize(
    ("module", "options", "error", "text"),
    [
        (lambda x: x, {}, ShardingError, "needs an nn.Module, which it traces (got function)"),
        (nn.LayerNorm(4), {}, ShardingError, "No parameter of LayerNorm can be sharded over 'model' (2 ranks)"),
        (nn.LayerNorm(4), {}, ShardingError, "weight: whole: dim 0 is a dim of an argument"),
        (nn.Linear(4, 4), {"axis": "rows"}, MeshError, "'rows'"),
        (nn.Linear(4, 4), {"mesh": None}, MeshError, "No mesh was given"),
        (nn.Linear(5, 4), {}, RuntimeError, "same reduction dim"),
    ],
)
def test_refused(module: Any, options: Any, error: type[Exception], text: str) -> None:
    given = {"axis": "model", "args": (TensorMeta((3, 4), torch.float32),), "mesh": MESHES[2], **options}
    with pytest.raises(error) as caught:
        spmd.tensor_parallel_specs(module, **given)
    assert text in str(caught.value)
