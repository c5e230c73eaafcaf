"""Specs by path, and fully sharded ones."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.func import functional_call

import spmd
from spmd import P, Shard, ShardingError, TensorMeta
from spmd.errors import MeshError

Pair = namedtuple("Pair", "left right")
MESH = spmd.make_mesh({"data": 2, "model": 4}, runtime="virtual")


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.float32)


def test_the_first_pattern_that_matches_counts() -> None:
    tree = {"layers": [{"q": meta(4, 4), "o": meta(4, 4)}, {"q": meta(4, 4), "o": meta(4, 4)}], "norm": meta(4)}
    found = spmd.specs(tree, {"layers.1.q": P(), "*.q": P("model"), "layers.*": P(None, "model")})
    expected = {
        "layers": [{"q": P("model"), "o": P(None, "model")}, {"q": P(), "o": P(None, "model")}],
        "norm": P(),
    }
    assert expected == found


def test_paths_have_keys_fields_and_positions() -> None:
    tree = {0: Pair(meta(2), (meta(2),)), "a.b": meta(2)}
    found = spmd.specs({"x": tree}, {"x.0.left": P("data"), "x.0.right.0": P("model"), "x.a.b": P(("data", "model"))})
    assert {"x": {0: Pair(P("data"), (P("model"),)), "a.b": P(("data", "model"))}} == found


def test_a_bare_tensor_has_the_empty_path() -> None:
    assert P("data") == spmd.specs(meta(2), {"": P("data")})
    assert P("data") == spmd.specs(meta(2), {}, P("data"))


def test_the_specs_of_a_module_serve_its_functional_call() -> None:
    module = model().double().eval()
    layout = spmd.specs(module, {"0.*": P("model"), "2.weight": P(None, "model"), "1.running_*": P("model")}, mesh=MESH)
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    assert list(state) == list(layout)
    placed = spmd.distribute(state, layout, MESH)
    x = torch.randn(6, 4, dtype=torch.float64)
    run = spmd.jit(lambda state, x: functional_call(module, state, x), (layout, P()), P(), mesh=MESH)
    torch.testing.assert_close(run(placed, x).full_tensor(), module(x))


def test_the_table_has_what_matched() -> None:
    shown: list[str] = []
    spmd.specs({"w": meta(8, 4), "b": meta(4)}, {"w": P("model")}, mesh=MESH, show=shown.append)
    expected = """\
path  tensor    spec        pattern
b     f32[4]    P()         (default)
w     f32[8,4]  P('model')  w
2 tensors, 144 B, of which a rank holds 48 B"""
    assert [expected] == shown


@pytest.mark.parametrize(
    ("tree", "patterns", "text"),
    [
        ({"layers": [{"q_proj": meta(4)}] * 9}, {"*.q_prj": P("model")}, "'*.q_prj' matches none of the 9 paths"),
        ({"layers": [{"q_proj": meta(4)}] * 9}, {"*.q_prj": P("model")}, "Nearest: 'layers.0.q_proj'"),
        ({"layers": [{"q_proj": meta(4)}] * 9}, {"*.q_prj": P("model")}, "and 1 more"),
        ({}, {"x": P()}, "none of the 0 paths of the tree. Paths: none"),
        ({"w": meta(4)}, {"*": P(), "w": P("model")}, "'w' has no effect: earlier patterns match all 1 paths"),
        ({"w": meta(4)}, {"w": P(None, "model")}, "leaf 'w' f32[4]: P(None, 'model') names 2 dims"),
        ({"w": 3}, {"w": P()}, "leaf 'w' is no tensor (got int 3)"),
        ({"w": meta(4)}, {"w": "model"}, "The spec of 'w' must be a P"),
        ({"w": meta(4)}, {3: P()}, "A pattern must be text"),
        ({"w": meta(4)}, [P()], "patterns must map paths to specs"),
    ],
)
def test_specs_refuse(tree: Any, patterns: Any, text: str) -> None:
    with pytest.raises(ShardingError) as caught:
        spmd.specs(tree, patterns)
    assert text in str(caught.value)


def test_a_default_that_is_no_spec_is_refused() -> None:
    with pytest.raises(ShardingError, match="The spec of 'default' must be"):
        spmd.specs({"w": meta(4)}, {}, default=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P("rows"), "leaf 'layers.w' f32[4]: Unknown mesh axis 'rows'"),
        ((Shard(0),), "leaf 'layers.w' f32[4]: Expected one placement for each"),
        ((Shard(1), Shard(0)), "leaf 'layers.w' f32[4]: Shard"),
    ],
)
def test_a_mesh_checks_axes(spec: Any, text: str) -> None:
    with pytest.raises(ShardingError) as caught:
        spmd.specs({"layers": {"w": meta(4)}}, {"*": spec}, mesh=MESH)
    assert text in str(caught.value)
    assert {"w": P("model")} == spmd.specs({"w": meta(5)}, {"*": P("model")}, mesh=MESH)  # uneven


@pytest.mark.parametrize(
    ("shape", "base", "mesh", "expected"),
    [
        ((8, 1024), P(), None, P("data")),
        ((8, 1024), P(), MESH, P(None, "data")),
        ((1024, 8), P(), MESH, P("data")),
        ((64, 64), P(), MESH, P("data")),
        ((1025, 6), P(), MESH, P(None, "data")),
        ((1025, 7), P(), MESH, P("data")),  # uneven
        ((1000,), P(), MESH, P()),
        ((1024,), P(), MESH, P("data")),
        ((64, 64), P("model"), MESH, P("model", "data")),
        ((64, 64), P("model"), None, P("model", "data")),
        ((1024, 7), P("model"), MESH, P(("model", "data"))),
        ((1024,), P("model"), None, P(("model", "data"))),
        ((64, 64), (spmd.Replicate(), Shard(0)), MESH, P("model", "data")),
        ((), P(), MESH, P()),
        ((0, 4096), P(), MESH, P()),
    ],
)
def test_fully_sharded(shape: tuple[int, ...], base: Any, mesh: spmd.Mesh | None, expected: P) -> None:
    assert [expected] == spmd.fsdp_specs([meta(*shape)], "data", base=[base], mesh=mesh)


def test_min_size() -> None:
    tree = {"w": meta(8, 8), "b": meta(8)}
    assert {"w": P("data"), "b": P("data")} == spmd.fsdp_specs(tree, "data", min_size=0)
    assert {"w": P("data"), "b": P()} == spmd.fsdp_specs(tree, "data", min_size=9)


def test_fully_sharded_training_is_that_of_one_device() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)).double()
    params = {name: value.detach() for name, value in module.named_parameters()}
    x = torch.randn(8, 4, dtype=torch.float64)
    layout = spmd.fsdp_specs(module, "data", min_size=8, mesh=MESH)
    assert {"0.weight": P("data"), "0.bias": P("data"), "2.weight": P(None, "data"), "2.bias": P()} == layout

    def step(params: Any, x: torch.Tensor) -> Any:
        return torch.func.grad(lambda params: functional_call(module, params, x).square().sum())(params)

    found = spmd.jit(step, (layout, P("data")), layout, mesh=MESH)(params, x)
    torch.testing.assert_close(spmd.full_tree(found), step(params, x))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"axis": 3}, ShardingError, "axis must be the name of a mesh axis (got 3)"),
        ({"axis": "rows", "mesh": MESH}, MeshError, "'rows'"),
        ({"min_size": -1}, ShardingError, "min_size must be a number of elements"),
        ({"base": P("data")}, ShardingError, "leaf 'w' f32[64,64]: its base spec P('data') uses mesh axis 'data'"),
        ({"base": P(None, None, "x")}, ShardingError, "leaf 'w' f32[64,64]: P(None, None, 'x') names 3 dims"),
        ({"base": {"v": P()}}, ShardingError, "base does not fit the tree"),
        ({"base": (Shard(0), Shard(0))}, ShardingError, "they need mesh=..."),
        ({"mesh": "data"}, MeshError, "mesh must be a Mesh"),
    ],
)
def test_fully_sharded_refuses(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        spmd.fsdp_specs({"w": meta(64, 64)}, **{"axis": "data", **options})
    assert text in str(caught.value)


def test_tied_tensors_have_any_of_their_names() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 8, bias=False))
    model[2].weight = model[0].weight
    mesh = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
    expected = {"0.weight": P("y", "x"), "1.weight": P("x"), "1.bias": P()}
    layout = spmd.specs(model, {"2.weight": P("y")})
    assert {"0.weight": P("y"), "1.weight": P(), "1.bias": P()} == layout
    for name in ("0.weight", "2.weight"):
        base = {"1.weight": P(), "1.bias": P(), name: P("y")}
        assert expected == spmd.fsdp_specs(model, "x", base=base, min_size=10, mesh=mesh)
        given = {**base, name: P("x")}
        compiled = spmd.jit(lambda model, x: model(x), (given, None), mesh=mesh).compile(model, torch.arange(4))
        assert P("x") == compiled.in_specs[0].pspec
    with pytest.raises(ShardingError, match=r"0.weight and 2.weight of Sequential are tied: one tensor"):
        spmd.fsdp_specs(model, "x", base={"0.weight": P("y"), "2.weight": P(), "1.weight": P(), "1.bias": P()})
    with pytest.raises(ShardingError, match=r"'2.*' has no effect: earlier patterns match all"):
        spmd.specs(model, {"0.weight": P("y"), "2.*": P("x")})
