"""Copies from a GPU, with a stand-in for its streams."""

import threading
from contextlib import contextmanager

import pytest
import torch

import spmd
from spmd import P
from spmd.checkpoint import load, save_async, saving
from spmd.checkpoint.staging import Staging

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")


class Stand:
    """What `torch.cuda` has of streams: says in order what happens, and in which thread one waits."""

    def __init__(self):
        self.log = []
        self.waited_in = []
        self.current = Stream(self, "current")

    def Stream(self, device):  # torch's name
        return Stream(self, f"side of {device}")

    def current_stream(self, device):
        return self.current

    @contextmanager
    def stream(self, stream):
        self.log.append(f"copy on {stream.name}")
        yield


class Stream:
    def __init__(self, stand, name):
        self.stand, self.name = stand, name

    def wait_stream(self, other):
        self.stand.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.stand.log.append(f"event on {self.name}")
        return self

    def synchronize(self):
        self.stand.log.append(f"host waits for {self.name}")
        self.stand.waited_in.append(threading.current_thread())


@pytest.fixture
def stand(monkeypatch):
    found = Stand()
    monkeypatch.setattr(saving, "Staging", lambda: Staging(found, "cpu"))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: found.log.append(f"{stream.name} holds it"))
    return found


def test_copies_wait_for_the_present_and_are_waited_for_by_the_future(stand, tmp_path):
    w = spmd.distribute(torch.arange(6.0), P("data"), MESH)
    save_async({"w": w, "b": torch.ones(2), "step": 3}, tmp_path).wait()
    assert [
        "side of cpu waits for current",
        *["copy on side of cpu", "side of cpu holds it"] * 3,
        "current waits for side of cpu",
        "event on side of cpu",
        "host waits for side of cpu",
    ] == stand.log
    assert ["spmd-checkpoint"] == [thread.name for thread in stand.waited_in]
    loaded = load(tmp_path, {"w": P(), "b": torch.ones(2), "step": 0}, mesh=MESH)
    assert torch.arange(6.0).equal(loaded["w"].full_tensor()) and torch.ones(2).equal(loaded["b"])


def test_an_error_of_the_copies_is_one_of_the_save(stand, tmp_path, monkeypatch):
    def fail(stream):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Stream, "synchronize", fail)
    running = save_async({"w": torch.ones(2)}, tmp_path / "run")
    with pytest.raises(spmd.CheckpointError, match="failed: RuntimeError: CUDA error"):
        running.wait()


def test_views_are_copied_whole(stand):
    staging = Staging(stand, "cpu")
    base = torch.arange(12.0).view(3, 4)
    for view in (base.t(), base[:, 1:3], base[0, 0], base[:0]):
        assert view.equal(staging.copy(view))
    other = Staging(stand)  # CPU tensors are not on its devices
    length = len(stand.log)
    assert base.equal(other.copy(base)) and length == len(stand.log)


@pytest.mark.parametrize("name", ["conj", "imag"])
def test_no_bit_of_the_source_is_left_to_the_copy(stand, monkeypatch, name):
    """Torch resolves it on the CPU, without waiting for what a GPU still has to copy."""
    copy_, sources = torch.Tensor.copy_, []

    def recorded(self, source, non_blocking=False):
        sources.append((source.is_conj(), source.is_neg(), non_blocking))
        return copy_(self, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", recorded)
    x = torch.tensor([1 + 2j, 3 - 1j]).conj()
    view = x if name == "conj" else x.imag
    assert view.is_conj() or view.is_neg()
    copy = Staging(stand, "cpu").copy(view)
    assert view.resolve_conj().resolve_neg().equal(copy) and [(False, False, True)] == sources
