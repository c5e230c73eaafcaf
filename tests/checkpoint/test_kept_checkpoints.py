"""Several saves in one folder: which stay, which is loaded, and loads while another job saves."""

import re
import threading

import checkpoint_cases as cases
import checkpoint_writers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from sampling import sample

from spmd import CheckpointError
from spmd.checkpoint import exists, load, save, save_async, saved
from spmd.checkpoint.reader import Reader

STEP = {"step": 0}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoint"


def steps(folder):
    """The steps of all saves in a folder, the newest first."""
    return [load(path, STEP)["step"] for path in saved(folder)]


def flip(path):
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage(save):
    """Flip a bit of the data of a save."""
    flip(save / "__0_0.distcp")


@pytest.mark.parametrize(
    ("keep", "expected"), [(1, [5]), (3, [5, 4, 3]), (9, [5, 4, 3, 2, 1, 0]), (None, [*range(5, -1, -1)])]
)
def test_the_last_ones_are_kept(folder, keep, expected):
    for step in range(6):
        save({"step": step}, folder, keep=keep)
    assert expected == steps(folder)
    assert 1 + len(expected) == len(list(folder.iterdir())), "the saves, and .metadata"


def test_named_ones_stay_until_the_name_is_given_again(folder):
    save({"step": 1}, folder, name="best")
    for step in range(2, 6):
        save({"step": step}, folder, keep=2)
    assert [5, 4, 1] == steps(folder)
    assert {"step": 1} == load(folder, STEP, name="best")
    save({"step": 6}, folder, keep=2, name="best")
    assert [6, 5, 4] == steps(folder)
    assert {"step": 6} == load(folder, STEP, name="best") == load(folder, STEP)
    assert exists(folder, name="best") and not exists(folder, name="worst")
    assert [saved(folder)[0]] == saved(folder, name="best")
    with pytest.raises(CheckpointError, match=r"There is no checkpoint named 'worst' in"):
        load(folder, STEP, name="worst")


@pytest.mark.parametrize("keep", [0, -1, 2.0, True, "3"])
def test_impossible_numbers_of_saves_are_refused(folder, keep):
    with pytest.raises(CheckpointError, match=re.escape("keep must be a number of saves from 1, or None for all of")):
        save({"step": 1}, folder, keep=keep)


@pytest.mark.parametrize("name", ["", "a/b", "..\\x", "a b", "x" * 101, "\n", 3])
def test_impossible_names_are_refused(folder, name):
    with pytest.raises(CheckpointError, match="The name of a save must be 1 to 100 letters"):
        save({"step": 1}, folder, name=name)


def test_torch_reads_the_newest_and_each_save_by_itself(folder, tmp_path):
    save({"w": torch.ones(2), "step": 1}, folder, name="best")
    save({"w": torch.zeros(2), "step": 2}, folder)
    moved = saved(folder, name="best")[0].rename(tmp_path / "moved")
    for path, step in ((folder, 2), (saved(folder)[0], 2), (moved, 1)):
        state = {"w": torch.full((2,), 9.0), "step": 0}
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.load(state, checkpoint_id=path)
        assert step == state["step"] and torch.full((2,), 2.0 - step).equal(state["w"])
        assert {"step": step} == load(path, STEP)


DAMAGE = {
    "data": (damage, r"The bytes of \w+ in \S+ are not those that were written\."),
    "metadata": (lambda save: flip(save / ".metadata"), r"\.metadata cannot be read: "),
    "missing": (lambda save: (save / "__0_0.distcp").unlink(), r"is incomplete: __0_0.distcp is missing\."),
    "empty": (lambda save: [path.unlink() for path in save.iterdir()], r"\.metadata cannot be read: "),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_newest_whole_one_is_loaded_after_damaged_ones(folder, kind):
    harm, message = DAMAGE[kind]
    for step in range(4):
        save({"step": step, "w": torch.ones(3)}, folder, keep=3)
    newest, second, third = saved(folder)
    harm(newest)
    harm(second)
    with pytest.warns(UserWarning) as warned:
        assert 1 == load(folder, {"step": 0, "w": torch.ones(3)})["step"]
    texts = [str(warning.message) for warning in warned]
    assert 2 == len(texts)
    for text, damaged in zip(texts, (newest, second), strict=True):
        assert damaged.name in text and re.search(message, text) and text.endswith(f" Loaded {third} instead."), text
    harm(third)
    with pytest.raises(CheckpointError, match=newest.name):
        load(folder, {"step": 0, "w": torch.ones(3)})


def test_a_damaged_one_that_is_asked_for_by_name_is_an_error(folder):
    save({"step": 1}, folder)
    save({"step": 2}, folder, name="best")
    damage(saved(folder, name="best")[0])
    with pytest.raises(CheckpointError, match=r"The bytes of step in .*-best/__0_0.distcp are not those that were"):
        load(folder, STEP, name="best")
    with pytest.warns(UserWarning, match="Loaded"):
        assert {"step": 1} == load(folder, STEP)


def test_older_ones_are_not_loaded_for_what_the_newest_lacks(folder):
    save({"step": 1, "loss": 2.0}, folder)
    save({"step": 2}, folder, keep=2)
    with pytest.raises(CheckpointError, match="loss: missing"):
        load(folder, {"step": 0, "loss": 0.0})


def test_a_failed_save_removes_nothing(folder):
    def fail(done, total):
        raise OSError("no space left on device")

    for step in range(3):
        save({"step": step}, folder, keep=2)
    with pytest.raises(CheckpointError, match="no space left"):
        save({"step": 3, "w": torch.ones(1)}, folder, on_progress=fail)
    assert [2, 1] == steps(folder)
    assert 3 == len(list(folder.iterdir()))


def test_all_processes_load_the_same_whole_one(workers, tmp_path):
    for error, warned, loaded in workers.run(cases.damaged_on_one_rank, str(tmp_path / "checkpoint"), ranks=2):
        assert re.match(r"DivergenceError: keep differs between ranks: 2 on rank 0; 3 on rank 1", error), error
        assert 1 == loaded
        (text,) = warned
        assert re.search(
            r"failed: rank 1: The bytes of x in .*__1_0.distcp are not those that .* Loaded .* instead", text
        )


# while another job saves


@pytest.fixture
def saving_job(folder, forks):
    """Starts a job that saves to the folder again and again, until the test is over."""
    started = []

    def start(keep):
        done, sender = forks.Pipe(duplex=False)
        # Saves without pauses could each remove the last one before a busy machine has read it.
        options = {"keep": keep, "pause": 0.03}
        process = forks.Process(target=checkpoint_writers.save_forever, args=(str(folder), 1, sender), kwargs=options)
        process.start()
        started.append(process)
        sender.close()
        done.recv()
        threading.Thread(target=lambda: list(checkpoint_writers.sent(done)), daemon=True).start()

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.faults
@pytest.mark.parametrize("keep", sample([1, 3], [3]))
def test_loads_while_another_job_saves_find_one_whole(folder, saving_job, keep):
    saving_job(keep)
    found = cases.load_repeatedly(str(folder), {"data": 2}, "virtual", 200)
    assert sorted(found) == found


@pytest.mark.faults
def test_processes_that_load_while_another_job_saves_find_the_same(workers, folder, saving_job):
    saving_job(20)
    first, second = workers.run(cases.load_repeatedly, str(folder), {"data": 2}, "distributed", 30, ranks=2)
    assert first == second == sorted(first)


@pytest.fixture
def before_reading(monkeypatch):
    """Sets what happens each time that a load is about to read data."""

    def set_action(action):
        def read_data(*args):
            action()
            return read(*args)

        read = Reader.read_data
        monkeypatch.setattr(Reader, "read_data", read_data)

    return set_action


def test_a_save_that_is_removed_while_it_is_read_is_left_for_a_newer_one(folder, before_reading):
    save({"step": 1}, folder)
    (first,) = saved(folder)
    before_reading(lambda: save({"step": 2}, folder) if exists(first) else None)
    assert {"step": 2} == load(folder, STEP)


def test_a_folder_whose_saves_are_removed_all_the_time_is_an_error(folder, before_reading):
    save({"step": 1}, folder)
    before_reading(lambda: save({"step": 2}, folder))
    with pytest.raises(CheckpointError, match=r"Each of 100 saves in .* was removed while it was read\. "):
        load(folder, STEP)


def test_saves_in_the_background_keep_too(folder):
    for step in range(4):
        save_async({"step": step}, folder, keep=2)
    assert {"step": 3} == load(folder, STEP)
    assert [3, 2] == steps(folder)
