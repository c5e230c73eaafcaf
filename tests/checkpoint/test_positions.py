"""The position of a run in its checkpoint: step, data, generators."""

import json
import random
import re

import checkpoint_cases as cases
import pytest
import torch

import spmd
from spmd import CheckpointError, P
from spmd.checkpoint import Position, load, save, save_async

DATA = {"epoch": 2, "files": ["a", "b"], "shard": None, "seen": 2**70, "rate": 0.5, "done": False}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoint"


def stored(folder):
    return load(folder, {"position": Position()})["position"]


@pytest.mark.parametrize(
    "call", [save, lambda tree, folder: save_async(tree, folder).wait()], ids=["save", "save_async"]
)
def test_a_run_goes_on_where_it_was(folder, call):
    own = torch.Generator().manual_seed(3)

    def draw():
        return [*torch.rand(2).tolist(), *torch.rand(2, generator=own).tolist(), random.random(), random.gauss(0, 1)]

    draw()  # `gauss` now holds back a number
    call({"w": torch.ones(2), "position": Position.now(5, DATA, generators={"dropout": own})}, folder)
    expected = draw(), draw()
    torch.manual_seed(9)
    random.seed(9)
    position = stored(folder)
    assert (5, DATA) == (position.step, position.data)
    own = torch.Generator()
    position.restore(generators={"dropout": own})
    assert expected == (draw(), draw())


def test_random_operators_go_on_where_they_were(folder):
    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    noisy = spmd.jit(lambda x: x + torch.randn_like(x), P("data"), P("data"), mesh=mesh)
    x = noisy(spmd.distribute(torch.zeros(5), P("data"), mesh))
    save({"x": x, "position": Position.now(1)}, folder)
    expected = noisy(x).full_tensor()
    loaded = load(folder, {"x": P(), "position": Position()}, mesh=mesh)
    loaded["position"].restore()
    assert expected.equal(noisy(spmd.distribute(loaded["x"].full_tensor(), P("data"), mesh)).full_tensor())


@pytest.mark.parametrize("data", [{1, 2}, torch.ones(2), float("nan"), b"x", {"a": len}], ids=repr)
def test_other_data_is_refused(data):
    with pytest.raises(CheckpointError, match=r"The data of a Position must be None, numbers, text, and lists"):
        Position(1, data)


@pytest.mark.parametrize("step", [-1, 1.0, True, None])
def test_other_steps_are_refused(step):
    with pytest.raises(CheckpointError, match=r"The step of a Position must be a number of steps from 0 \(got"):
        Position(step)


def test_data_is_as_it_will_be_loaded():
    assert [1, [2]] == Position(0, (1, (2,))).data


def test_other_generators_than_those_saved_are_refused(folder):
    position = Position.now(1, generators={"dropout": torch.Generator()})
    with pytest.raises(CheckpointError, match=r"states of the generators 'dropout', 'torch', and here are 'torch'\."):
        position.restore()
    with pytest.raises(CheckpointError, match=r"of the generators 'torch', and here are 'mine', 'torch'"):
        Position.now(1).restore(generators={"mine": torch.Generator()})
    with pytest.raises(CheckpointError, match=r"A generator cannot be named 'python'"):
        Position.now(1, generators={"python": torch.Generator()})


@pytest.mark.parametrize("name", ["torch", "python"])
@pytest.mark.parametrize("state", ["", "00", "x", "[]", "[3, [1], null]", "[3, 1, 2]"])
def test_states_that_are_none_are_refused(name, state):
    position = Position.now(1)
    with pytest.raises(CheckpointError, match="The state of a generator cannot be restored"):
        Position(1, None, {**position.generators, name: state}).restore()


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "3", '{"data": 1}', '{"data": 1, "step": -1, "generators": {}, "processes": 1}', '{"data": NaN}'],
)
def test_texts_that_are_no_position_are_refused(folder, text):
    save({"position": text}, folder)
    with pytest.raises(CheckpointError, match="Leaf position of the checkpoint cannot be loaded: it is not a Position"):
        stored(folder)


def test_numbers_and_tensors_are_no_positions(folder):
    for leaf, message in ((3, "it is not a Position"), (torch.ones(2), r"position: f32\[2\] in the checkpoint")):
        save({"position": leaf}, folder)
        with pytest.raises(CheckpointError, match=message):
            stored(folder)


def test_processes_have_positions_of_their_own(workers, tmp_path):
    folder = str(tmp_path / "run")
    for rank, found in enumerate(workers.run(cases.positions, folder, ranks=2)):
        assert (8, {"batch": 10 + rank}) == found["data"]
        assert [True] * 3 == found["goes on"]
        message = "leaf position differs between ranks: a Position at step 0 on rank 0; a Position at step 1 on rank 1"
        assert f"DivergenceError: {message}" in found["step"]
    alone = load(f"{folder}-same", {"position": Position()})["position"]
    assert (7, {"batch": 3}) == (alone.step, alone.data)
    assert [str(alone)] * 3 == workers.run(cases.load_position, f"{folder}-same", ranks=3)
    message = r"Leaf position was saved by 2 processes, of which 1 had other data or generators than rank 0, and cannot"
    for found in workers.run(cases.load_position, f"{folder}-different", ranks=3):
        assert re.match(rf"{message} be loaded by 3\.", found), found
    with pytest.raises(CheckpointError, match=rf"{message} be loaded by 1\."):
        load(f"{folder}-different", {"position": Position()})


def test_a_position_is_stored_once_if_all_share_it(workers, tmp_path):
    workers.run(cases.positions, str(tmp_path / "run"), ranks=2)
    text = load(tmp_path / "run-same", {"position": ""})["position"]
    assert {"step": 7, "processes": 2} == {name: json.loads(text)[name] for name in ("step", "processes")}
    with pytest.raises(CheckpointError, match=r"position@1: missing\nIt has besides: position, x\."):
        load(tmp_path / "run-same", {"position@1": ""})
