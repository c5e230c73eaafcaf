import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import safetensors_cases as cases
import torch
from workers import call_on_mesh

import spmd
from spmd import P

MESH = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
TENSORS = cases.tensors()
AXES = [{"x": 2}, {"x": 2, "y": 2}]


def assert_same(expected, found):
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (tensor.dtype, tensor.shape) == (found[name].dtype, found[name].shape)
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize("axes", AXES)
def test_files_of_safetensors_are_loaded(on_ranks, tmp_path, axes):
    safetensors.torch.save_file(TENSORS, tmp_path / "a.safetensors")
    for found in on_ranks(cases.load, axes, str(tmp_path / "a.safetensors")):
        assert_same(TENSORS, {name: value for name, (_, value) in found.items()})
        assert P() == found["scale"][0]


@pytest.mark.parametrize("axes", AXES)
def test_saved_files_are_those_of_safetensors(on_ranks, tmp_path, axes):
    on_ranks(cases.save, axes, str(tmp_path), "5GB")
    assert ["model.safetensors"] == os.listdir(tmp_path)
    assert_same(TENSORS, safetensors.torch.load_file(tmp_path / "model.safetensors"))
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert {"format": "pt"} == opened.metadata()
    for found in on_ranks(cases.load, axes, str(tmp_path)):
        assert_same(TENSORS, {name: value for name, (_, value) in found.items()})


@pytest.mark.parametrize("axes", AXES)
def test_large_trees_are_several_files(on_ranks, tmp_path, axes):
    on_ranks(cases.save, axes, str(tmp_path), 192)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    homes = index["weight_map"]
    assert sum(tensor.nbytes for tensor in TENSORS.values()) == index["metadata"]["total_size"]
    assert [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)] == sorted(set(homes.values()))
    assert sorted({*homes.values(), "model.safetensors.index.json"}) == sorted(os.listdir(tmp_path))
    for file in set(homes.values()):
        expected = {name: TENSORS[name] for name, home in homes.items() if home == file}
        assert_same(expected, safetensors.torch.load_file(tmp_path / file))
        assert 1 == len(expected) or sum(tensor.nbytes for tensor in expected.values()) <= 192
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        for found in on_ranks(cases.load, axes, str(path)):
            assert_same(TENSORS, {name: value for name, (_, value) in found.items()})


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_its_shards_only(workers, tmp_path, ranks, files):
    whole = {"w": torch.ones(64, 4096), "v": torch.ones(64, 4096)}
    spmd.save_safetensors(whole, tmp_path, max_shard_size=2 * whole["w"].nbytes // files)
    assert files == len(list(tmp_path.glob("*.safetensors")))
    size = sum(tensor.nbytes for tensor in whole.values())
    for spec in (P("x"), P(None, "x")):
        args = (cases.bytes_read, {"x": ranks}, "distributed", str(tmp_path), spec)
        for read, held, stored in workers.run(call_on_mesh, *args, ranks=ranks):
            assert [size // ranks] * 3 == [read, held, stored]


def test_a_rank_sends_its_shard_and_only_the_first_holds_a_tensor_whole(workers, tmp_path):
    args = (cases.bytes_held_while_saving, {"x": 2, "y": 2}, "distributed", str(tmp_path))
    first, *others = workers.run(call_on_mesh, *args, ranks=4)
    whole = 64 * 4096 * 4
    assert [whole, *[whole // 4] * 3] == [first, *others]
    assert torch.equal(torch.ones(64, 4096), safetensors.torch.load_file(tmp_path / "model.safetensors")["w"])


def test_a_conjugate_is_saved_as_its_values(tmp_path):
    x = torch.tensor([1 + 2j, 3 - 4j])
    spmd.save_safetensors({"x": x.conj(), "y": spmd.distribute(x, P("x"), MESH).conj()}, tmp_path)
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert [x.conj().tolist()] * 2 == [found["x"].tolist(), found["y"].tolist()]


def test_saves_replace_each_other(tmp_path):
    for limit, expected in ((200, TENSORS), ("1 kB", TENSORS), (200, {"w": torch.ones(60), "v": torch.zeros(60)})):
        spmd.save_safetensors(expected, tmp_path, max_shard_size=limit)
        files = set(json.loads(index.read_text())["weight_map"].values()) if (index := index_of(tmp_path)) else set()
        assert (files | {index.name} if files else {"model.safetensors"}) == set(os.listdir(tmp_path))
        found = spmd.load_safetensors(tmp_path, P(), MESH)
        assert_same(expected, {name: tensor.full_tensor() for name, tensor in found.items()})


def index_of(folder):
    return next(folder.glob("*.index.json"), None)


def test_specs_by_tree_and_for_all(tmp_path):
    spmd.save_safetensors({"layers": [{"w": torch.ones(4, 3)}, {"w": torch.ones(4, 3)}]}, tmp_path / "a.safetensors")
    tree = {"layers": [{"w": P("x")}, {"w": P(None, "y")}]}
    loaded = spmd.load_safetensors(tmp_path / "a.safetensors", tree, MESH)
    assert [P("x"), P(None, "y")] == [loaded[f"layers.{number}.w"].spec.pspec for number in range(2)]
    loaded = spmd.load_safetensors(tmp_path / "a.safetensors", (spmd.Shard(0), spmd.Replicate()), MESH)
    assert {P("x")} == {tensor.spec.pspec for tensor in loaded.values()}


def test_floating_point_tensors_are_converted(tmp_path):
    spmd.save_safetensors(TENSORS, tmp_path)
    loaded = spmd.load_safetensors(tmp_path, P(), MESH, dtype=torch.bfloat16)
    expected = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for name, tensor in TENSORS.items()
    }
    assert_same(expected, {name: tensor.full_tensor() for name, tensor in loaded.items()})


def test_plain_tensors_and_views_are_saved(tmp_path):
    tree = {
        "t": torch.arange(6.0).reshape(2, 3).t(),
        "part": torch.arange(9)[3:5],
        "p": torch.nn.Parameter(torch.ones(2)),
    }
    spmd.save_safetensors(tree, tmp_path)
    assert_same(
        {name: tensor.detach() for name, tensor in tree.items()},
        safetensors.torch.load_file(tmp_path / "model.safetensors"),
    )


ONE = torch.ones(2)
DONATED = spmd.distribute(torch.ones(2), P(), MESH)
SAVING_ERRORS = [
    ({"a": ONE, "b": {"c": ONE}}, r"Leaves a and b\.c are one tensor, .* Leave one out, as transformers does"),
    ({"a": 3}, r"Leaf a must be a tensor \(got int\)"),
    ({"a": torch.ones(2, dtype=torch.complex128)}, r"Leaf a has the dtype torch\.complex128, which safetensors lacks"),
    ({"a": torch.ones(2, device="meta")}, r"Leaf a must be a dense tensor with data \(got a meta tensor\)"),
    ({"a": spmd.distribute(ONE, P(partial={"x": "sum"}), MESH)}, r"Leaf a .* holds final values"),
]


@pytest.mark.parametrize(("tree", "text"), SAVING_ERRORS)
def test_what_cannot_be_saved(tmp_path, tree, text):
    with pytest.raises((spmd.CheckpointError, spmd.ShardingError), match=text):
        spmd.save_safetensors(tree, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_names_that_the_files_lack_are_listed_with_the_nearest(tmp_path):
    spmd.save_safetensors(TENSORS, tmp_path)
    with pytest.raises(spmd.CheckpointError) as caught:
        spmd.load_safetensors(tmp_path, {"layers.0.v": P(), "flag": P("x"), "scale": P("x"), "#": P()}, MESH)
    first, *lines = str(caught.value).splitlines()
    assert f"The specs do not fit the tensors in {tmp_path}:" == first
    assert ["  #: missing", "  flag: missing; the nearest are flags"] == lines[:2]
    assert "  layers.0.v: missing; the nearest are layers.0.w, layers.0.b, layers.1.w" == lines[2]
    assert re.match(r"  scale f64\[\]: .* names 1 dims", lines[3])


def test_what_cannot_be_loaded(tmp_path):
    spmd.save_safetensors(TENSORS, tmp_path, max_shard_size=192)
    index, file = tmp_path / "model.safetensors.index.json", tmp_path / "model-00001-of-00003.safetensors"
    for path, text in (
        (tmp_path / "none", r"no safetensors file at .*none \(looked for none\)"),
        (tmp_path.parent, r"looked for model\.safetensors, model\.safetensors\.index\.json"),
    ):
        with pytest.raises(spmd.CheckpointError, match=text):
            spmd.load_safetensors(path, P(), MESH)
    data, text = file.read_bytes(), index.read_text()
    for change, expected in (
        (lambda: file.write_bytes(data[:-1]), rf"{file} is damaged: .*Write it again"),
        (lambda: file.write_bytes(b""), rf"{file} is damaged"),
        (file.unlink, rf"no file {file}\. Copy all files"),
        (lambda: index.write_text("{}"), rf"{index} is damaged: KeyError"),
        (
            lambda: index.write_text(text.replace("model-00001", "../model-00001")),
            "other than names of files beside it",
        ),
        (lambda: index.write_text(text.replace('"empty"', '"other"')), rf"{file} lacks other, which {index} says"),
    ):
        change()
        with pytest.raises(spmd.CheckpointError, match=expected):
            spmd.load_safetensors(tmp_path, P(), MESH)
        file.write_bytes(data)
        index.write_text(text)


ERRORS = {
    "path": r"DivergenceError: the path differs between ranks: \S+ on rank 0; \S+/model.safetensors on rank 1",
    "specs": r"DivergenceError: tensor flags differs between ranks: b8\[3\] P\(\) .* on rank 0; b8\[3\] P\('x'\)",
    "name": r"(?s)CheckpointError: The specs do not fit .*layers.0.v: missing; the nearest are layers.0.w",
    "missing": r"CheckpointError: (Rank 1 of 2 failed: )?There is no safetensors file at missing",
    "damaged": r"CheckpointError: (Rank 1 of 2 failed: )?damaged.safetensors is damaged",
    "other": r"DivergenceError: (the files|tensor w) differs between ranks",
    "leaf": r"CheckpointError: (Rank 1 of 2 failed: )?Leaf w must be a tensor",
    "value": r"DivergenceError: leaf w differs between ranks: f32\[2\] with digest",
    "disk": r"CheckpointError: (Rank 0 of 2 failed: )?Saving to \S+ failed: OSError: no space left on device",
}


def test_errors_reach_all_ranks(workers, tmp_path):
    spmd.save_safetensors(TENSORS, tmp_path / "shared")
    for rank in range(2):
        own = tmp_path / f"of rank {rank}"
        spmd.save_safetensors({"w": torch.ones(2 + rank)}, own / "other.safetensors")
        spmd.save_safetensors(TENSORS, own / "damaged.safetensors")
        if rank == 0:
            spmd.save_safetensors(TENSORS, own / "missing")
        else:
            (own / "damaged.safetensors").write_bytes((own / "damaged.safetensors").read_bytes()[:-1])
    for found in workers.run(call_on_mesh, cases.errors, {"x": 2}, "distributed", str(tmp_path), ranks=2):
        assert ERRORS.keys() == found.keys()
        for name, pattern in ERRORS.items():
            assert re.match(pattern, found[name]), found[name]
    assert [] == os.listdir(tmp_path / "full")
    assert ["model.safetensors"] == os.listdir(tmp_path / "shared")


KILLED = """
import os, signal, sys, torch, spmd
from spmd.checkpoint import safetensors_saving
append = safetensors_saving._File._append
def killed(file, tensor):
    append(file, tensor)
    os.kill(os.getpid(), signal.SIGKILL)
safetensors_saving._File._append = killed
spmd.save_safetensors({"w": torch.ones(5), "v": torch.ones(5)}, sys.argv[1])
"""


def test_a_save_that_is_killed_leaves_the_earlier_file(tmp_path):
    spmd.save_safetensors({"w": torch.zeros(3)}, tmp_path)
    root = Path(spmd.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, timeout=240)
    assert -signal.SIGKILL == run.returncode
    assert_same({"w": torch.zeros(3)}, safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert 2 == len(os.listdir(tmp_path))
