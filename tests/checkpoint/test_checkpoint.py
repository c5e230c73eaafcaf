import itertools
import math
import random
import re
import signal
import tempfile
import time
from typing import NamedTuple

import attrs
import checkpoint_writers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
from spmd import CheckpointError, DTensorSpec, MeshError, P, Shard, ShardingError, TensorMeta
from spmd.checkpoint import exists, load, save, save_async, saved
from spmd.testing.strategies import meshes, tensor_specs, tensors

MESH = spmd.make_mesh({"data": 2, "model": 3}, runtime="virtual")
OTHER = spmd.make_mesh({"pipe": 4}, runtime="virtual")
HALVES = spmd.make_mesh({"data": 2}, runtime="virtual")
SPEC = P("model", "data")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoint"


def stored(folder):
    """What DCP itself says of a checkpoint, by name."""
    return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata


def data_file(folder):
    (path,) = folder.glob("data-*/*.distcp")
    return path


def placed(shape=(5, 7), spec=SPEC):
    return spmd.distribute(torch.arange(float(math.prod(shape))).view(shape), spec, MESH)


def fail(done, total):
    raise OSError("no space left on device")


class State(NamedTuple):
    params: dict
    momentum: dict | None
    step: torch.Tensor


@given(st.data())
def test_what_one_mesh_saves_another_loads(data):
    written = data.draw(tensor_specs(partial=False))
    wanted = data.draw(tensor_specs(meta=written.meta, partial=False))
    value = data.draw(tensors(written.meta))
    with tempfile.TemporaryDirectory() as folder:
        save({"x": spmd.distribute(value, written.pspec, written.mesh)}, folder)
        assert written.meta.numel == sum(math.prod(chunk.sizes) for chunk in stored(folder)["x"].chunks)
        loaded = load(folder, {"x": wanted})["x"]
    assert wanted == loaded.spec
    for coordinate, shard in zip(wanted.mesh.coordinates(), loaded.shards, strict=True):
        torch.testing.assert_close(shard, value[wanted.local_slices(coordinate)], rtol=0, atol=0)


@settings(max_examples=30)
@given(meshes(), st.data())
def test_shards_loaded_are_nobody_elses(mesh, data):
    spec = data.draw(tensor_specs(mesh=mesh, meta=TensorMeta((4, 3), torch.float32), partial=False))
    with tempfile.TemporaryDirectory() as folder:
        save(torch.ones(4, 3), folder)
        loaded = load(folder, spec)
    places = [shard.data_ptr() for shard in loaded.shards if shard.numel()]
    assert len(places) == len(set(places))


def test_any_pytree(folder):
    tree = State({"blocks": [{"w": placed()}, {"w": torch.ones(2, dtype=torch.bfloat16)}]}, None, placed((), P()))
    extra = {"loss": 2.5, "name": "run", "done": True, "phase": 1 + 2j, "raw": b"\x00\xff", "count": 2**70}
    save((tree, extra), folder)
    names = {"0.params.blocks.0.w", "0.params.blocks.1.w", "0.step", *(f"1.{name}" for name in extra)}
    assert names == stored(folder).keys()
    state, numbers = load(folder, (tree, dict.fromkeys(extra, 0)))
    assert extra == numbers
    assert {name: type(value) for name, value in extra.items()} == {n: type(value) for n, value in numbers.items()}
    assert state.momentum is None
    assert tree.step.spec == state.step.spec and 0.0 == state.step.item()
    assert placed().full_tensor().equal(state.params["blocks"][0]["w"].full_tensor())
    assert torch.ones(2, dtype=torch.bfloat16).equal(state.params["blocks"][1]["w"])


def test_like_is_left_alone(folder):
    save({"w": placed(), "b": torch.ones(3)}, folder)
    like = {"w": spmd.distribute(torch.zeros(5, 7), P("data"), MESH), "b": torch.zeros(3)}
    loaded = load(folder, like)
    assert 0.0 == like["w"].full_tensor().sum() == like["b"].sum()
    assert 3.0 == loaded["b"].sum()


@pytest.mark.parametrize(
    "like",
    [
        P("pipe"),
        (Shard(0),),
        DTensorSpec.make(OTHER, P("pipe"), TensorMeta((5, 7), torch.float32)),
        spmd.distribute(torch.zeros(5, 7), P("pipe"), OTHER),
    ],
    ids=["P", "placements", "DTensorSpec", "DTensor"],
)
def test_like_names_a_layout(folder, like):
    save(placed(), folder)
    with spmd.use_mesh(OTHER):
        loaded = load(folder, like)
    assert DTensorSpec.make(OTHER, P("pipe"), TensorMeta((5, 7), torch.float32)) == loaded.spec
    assert placed().full_tensor().equal(loaded.full_tensor())


@pytest.mark.parametrize("like", [TensorMeta((5, 7), torch.float32), torch.zeros(5, 7), torch.zeros(5, 7).to("meta")])
def test_like_may_want_a_plain_tensor(folder, like):
    save(placed(), folder)
    loaded = load(folder, like)
    assert type(loaded) is torch.Tensor and placed().full_tensor().equal(loaded)


def test_a_part_of_a_checkpoint_loads(folder):
    save({"params": {"w": placed()}, "step": 3}, folder)
    assert {"step": 3} == load(folder, {"step": 0})


def test_bare_specs_need_a_mesh(folder):
    save({"w": placed()}, folder)
    with pytest.raises(MeshError, match="No mesh was given"):
        load(folder, {"w": P()})


def test_views_and_gradients_are_stored_as_values(folder):
    base = torch.arange(12.0).view(3, 4).requires_grad_()
    save({"part": base[:, 1:3], "turned": base.t()}, folder)
    loaded = load(folder, {"part": TensorMeta((3, 2), torch.float32), "turned": TensorMeta((4, 3), torch.float32)})
    assert base[:, 1:3].equal(loaded["part"]) and base.t().equal(loaded["turned"])
    assert not loaded["part"].requires_grad


def test_a_tree_of_another_shape_with_the_same_names_loads(folder):
    save(State({"w": placed()}, None, torch.tensor(4)), folder)
    loaded = load(folder, {"params": {"w": P("pipe")}, "step": TensorMeta((), torch.int64)}, mesh=OTHER)
    assert 4 == loaded["step"] and placed().full_tensor().equal(loaded["params"]["w"].full_tensor())


# torch's own tools


def test_torch_reads_what_is_saved(folder):
    save({"params": [placed()], "step": 3}, folder)
    state = {"params": [torch.zeros(5, 7)], "step": 0}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=folder)
    assert 3 == state["step"] and placed().full_tensor().equal(state["params"][0])


def test_what_torch_saved_loads(folder):
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"params": [torch.arange(35.0).view(5, 7)], "step": 3}, checkpoint_id=folder)
    loaded = load(folder, {"params": [P("data", "model")], "step": 0}, mesh=MESH)
    assert 3 == loaded["step"] and placed().full_tensor().equal(loaded["params"][0].full_tensor())


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, ("model", "data"))])
def test_torch_saves_dtensors_and_loads_into_them(folder, spec):
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"w": placed()}, checkpoint_id=folder)
        target = spmd.distribute(torch.zeros(5, 7), spec, MESH)
        dcp.load({"w": target}, checkpoint_id=folder)
    for coordinate, shard in zip(MESH.coordinates(), target.shards, strict=True):
        assert placed().full_tensor()[target.spec.local_slices(coordinate)].equal(shard)


def test_names_give_replicas_their_turns():
    spec = DTensorSpec.make(MESH, P("model"), TensorMeta((6,), torch.float32))
    coordinates = list(MESH.coordinates())
    turns = {tuple(spmd.api.values.checkpointable.owned(spec, coordinates, f"layer{number}")) for number in range(20)}
    assert {(0, 1, 2), (3, 4, 5)} == turns


# errors


def test_everything_that_differs_is_listed(folder):
    save({"a": placed(), "b": torch.ones(3), "c": 5, "d": torch.ones(2), "e": torch.ones(4), "f": 1}, folder)
    like = {
        "a": TensorMeta((5, 6), torch.float32),
        "b": torch.ones(3, dtype=torch.float64),
        "c": torch.ones(()),
        "d": 7,
        "e": P("data", "model"),
        "g": P(),
    }
    with pytest.raises(CheckpointError) as caught:
        load(folder, like, mesh=MESH)
    lines = str(caught.value).splitlines()
    assert f"The checkpoint in {folder} is not like what is wanted:" == lines[0]
    assert "  a: f32[5,7] in the checkpoint, f32[5,6] in like" == lines[1]
    assert "  b: f32[3] in the checkpoint, f64[3] in like" == lines[2]
    assert "  c: a number or text in the checkpoint, f32[] in like" == lines[3]
    assert "  d: f32[2] in the checkpoint, a number or text in like" == lines[4]
    assert lines[5].startswith("  e f32[4]: P('data', 'model') names 2 dims but the tensor f32[4] has 1.")
    assert ["  g: missing", "It has besides: f."] == lines[6:8]
    assert lines[8].startswith("Give the names, shapes and dtypes that were saved")


def test_specs_of_numbers_and_partial_specs_are_refused(folder):
    save({"a": 3, "b": torch.ones(2)}, folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder, {"a": P(), "b": P(partial={"data": "sum"})}, mesh=MESH)
    assert "a: a number or text in the checkpoint, the spec P() in like" in str(caught.value)
    assert "Leaf b f32[2] P(partial={'data': 'sum'}) is still to be reduced over 'data'" in str(caught.value)


def test_partial_values_are_not_saved(folder):
    with pytest.raises(
        ShardingError, match=r"Leaf w .* a checkpoint holds final .* \.redistribute\(P\(None, 'model'\)\)"
    ):
        save({"w": placed(spec=P(None, "model", partial={"data": "sum"}))}, folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (len, "Leaf x must be a tensor, a number or text (got builtin_function_or_method)"),
        (torch.nn.Linear(2, 2), "got Linear). Pass its state, dict(module.named_parameters())"),
        (torch.ones(2, device="meta"), "Leaf x must be a dense tensor with data (got a meta tensor)"),
        (torch.eye(2).to_sparse(), "Leaf x must be a dense tensor with data (got layout torch.sparse_coo)"),
    ],
)
def test_other_leaves_are_refused(folder, leaf, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        save({"x": leaf}, folder)
    assert not folder.exists()


def test_two_leaves_of_one_name_are_refused(folder):
    with pytest.raises(CheckpointError, match=re.escape("stored as 'a.b': ['a']['b'] and ['a.b']. Rename")):
        save({"a.b": 1, "a": {"b": 2}}, folder)


def test_donated_leaves_are_refused(folder):
    w = placed()
    spmd.jit(lambda x: x + 1, (SPEC,), SPEC, mesh=MESH, donate_argnums=0)(w)
    with pytest.raises(ShardingError, match="donated"):
        save({"w": w}, folder)


def test_abstract_meshes_are_refused(folder):
    save({"w": placed()}, folder)
    mesh = spmd.make_mesh({"data": 2}, runtime="abstract")
    with pytest.raises(MeshError, match="abstract mesh holds no data"):
        load(folder, {"w": P()}, mesh=mesh)


def test_no_checkpoint(folder):
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*: it has no complete save and no file \.metadata"):
        load(folder, 0)


def test_exists(folder):
    assert not exists(folder)
    folder.mkdir()
    assert not exists(folder)
    save({"step": 1}, folder)
    assert exists(folder)


def test_a_file_is_no_checkpoint(folder):
    folder.write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        save(0, folder)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load(folder, 0)


def test_missing_and_short_files_are_found(folder):
    save({"w": placed()}, folder)
    path = data_file(folder)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{path.parent.name} is incomplete: __0_0.distcp has \d+ bytes and not"):
        load(folder, {"w": placed()})
    path.unlink()
    with pytest.raises(CheckpointError, match="distcp is missing"):
        load(folder, {"w": placed()})


def test_every_damaged_byte_of_the_data_is_found(folder):
    save({"w": torch.ones(3), "step": 3}, folder)
    path = data_file(folder)
    sound = path.read_bytes()
    for position in range(0, len(sound), 97):
        path.write_bytes(sound[:position] + bytes([sound[position] ^ 1]) + sound[position + 1 :])
        with pytest.raises(CheckpointError, match=r"The bytes of (w|step) in .* are not those that were written"):
            load(folder, {"w": torch.ones(3), "step": 0})


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x80\x04N."], ids=["empty", "nonsense", "None"])
def test_damaged_metadata_is_found(folder, content):
    save({"step": 3}, folder)
    (saved(folder)[0] / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata (cannot be read|is not the metadata)"):
        load(folder, {"step": 0})


def test_a_tensor_that_is_not_all_there_is_refused(folder):
    @attrs.frozen
    class Half:
        """A tensor of which one rank of two has saved its part."""

        def __create_write_items__(self, name, value):
            return placed((4,), P("data")).__create_write_items__(name, value)[:1]

    class Planner(dcp.DefaultSavePlanner):
        def lookup_object(self, index):
            return torch.ones(2)

    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"w": Half()}, checkpoint_id=folder, planner=Planner())
    with pytest.raises(CheckpointError, match="w: only 2 of the 4 elements"):
        load(folder, {"w": torch.ones(4)})


def test_a_failed_save_leaves_the_last_one_and_no_litter(folder):
    save({"step": 3, "w": torch.ones(2)}, folder)
    with pytest.raises(CheckpointError, match=f"Saving to {re.escape(str(folder))} failed: OSError: no space left"):
        save({"step": 4, "w": torch.zeros(2)}, folder, on_progress=fail)
    assert {"step": 3} == load(folder, {"step": 0})
    assert 1 == len(list(folder.glob("data-*")))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="failed: NotADirectoryError"):
        save({"step": 3}, tmp_path / "file" / "checkpoint")


# in the background


def test_what_happens_after_save_async_is_not_saved(folder):
    plain, w = torch.ones(2), placed()
    expected = w.full_tensor()
    step = spmd.jit(lambda x: x + 1, (w.spec.pspec,), w.spec.pspec, mesh=MESH, donate_argnums=0)
    saving = save_async({"plain": plain, "w": w}, folder)
    plain.zero_()
    for shard in w.shards:
        shard.zero_()
    step(w)
    saving.wait()
    assert saving.is_done
    loaded = load(folder, {"plain": plain, "w": P()}, mesh=OTHER)
    assert torch.ones(2).equal(loaded["plain"]) and expected.equal(loaded["w"].full_tensor())


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model"), P(("model", "data"))])
@pytest.mark.parametrize("shape", [(5, 7), (0, 4), (1, 1)])
def test_save_async_saves_the_same(folder, shape, spec):
    w = placed(shape, spec)
    save_async({"w": w}, folder).wait()
    assert w.full_tensor().equal(load(folder, {"w": P()}, mesh=OTHER)["w"].full_tensor())


def test_progress_goes_up_to_the_total(folder):
    seen = []
    tree = {"a": placed(), "b": placed(spec=P()), "c": torch.ones(3), "step": 2}
    save_async(tree, folder, on_progress=lambda done, total: seen.append((done, total))).wait()
    total = 4 * (35 + 35 + 3)
    assert {total} == {of for _, of in seen}
    done = [done for done, _ in seen]
    assert sorted(done) == done and 0 == done[0] and total == done[-1]
    assert len(set(done)) > 3


def test_wait_raises_what_went_wrong_once(folder):
    saving = save_async({"w": torch.ones(2)}, folder, on_progress=fail)
    with pytest.raises(CheckpointError, match="no space left"):
        saving.wait()
    saving.wait()
    save({"step": 1}, folder)


@pytest.mark.parametrize("call", [lambda folder: save({"step": 1}, folder), lambda folder: load(folder, {"step": 0})])
def test_an_error_that_nobody_waited_for_is_raised_by_the_next_call(folder, call):
    save({"step": 0}, folder)
    save_async({"w": torch.ones(2)}, folder, on_progress=fail)
    with pytest.raises(CheckpointError, match="no space left"):
        call(folder)
    assert 0 == load(folder, {"step": 9})["step"]


def test_saves_in_the_background_are_in_order(folder):
    for number in range(5):
        save_async({"step": number}, folder)
    assert {"step": 4} == load(folder, {"step": 0})
    assert 1 == len(list(folder.glob("data-*")))


# killed


@pytest.mark.faults
def test_killed_before_any_of_its_steps_a_save_leaves_one_whole(folder, forks):
    save(checkpoint_writers.tree(0, HALVES), folder)
    last, kept = 0, []
    for count in itertools.count():
        process = forks.Process(target=checkpoint_writers.save_until, args=(str(folder), count + 1, count))
        process.start()
        process.join()
        last = checkpoint_writers.assert_one_number(folder, HALVES, {last, count + 1})
        kept.append(last == count + 1)
        if process.exitcode == 0:
            break
        assert -signal.SIGKILL == process.exitcode
    assert sorted(kept) == kept and kept[-1]
    assert kept.count(False) >= 4, "the folder, the data, the metadata, the replacement"
    assert kept.count(True) >= 2, "the removal of earlier data, and the end"
    assert 1 == len(list(folder.glob("data-*")))


@pytest.mark.faults
def test_killed_at_random_moments_a_save_leaves_one_whole(folder, forks):
    moments = random.Random(0)
    number = 0
    for _ in range(10):
        done, sender = forks.Pipe(duplex=False)
        process = forks.Process(target=checkpoint_writers.save_forever, args=(str(folder), number + 1, sender))
        process.start()
        sender.close()
        number = done.recv()
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.join()
        number = [number, *checkpoint_writers.sent(done)][-1]
        number = checkpoint_writers.assert_one_number(folder, HALVES, {number, number + 1})
