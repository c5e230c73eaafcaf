"""Collectives that a GPU does not finish, with stand-ins for its events."""

import os
import subprocess
import sys

import pytest
import torch

from spmd.collectives.distributed import bucket
from spmd.collectives.distributed.bucket import Bucket
from spmd.collectives.transport import exchange
from spmd.collectives.transport.exchange import Exchange
from spmd.job import collective_scope, device_launches, device_watch, failure_detector
from spmd.job.collective_scope import CollectiveScope
from spmd.job.device_launches import DeviceLaunches
from spmd.job.device_watch import DeviceWatch
from spmd.testing.local_job import local_job


class Device:
    """Events of a device that finishes what it is told to, and a clock."""

    def __init__(self):
        self.finished = self.recorded = self.asked = 0
        self.now, self.has_failed = 0.0, False

    def record(self):
        self.recorded += 1
        return Event(self, self.recorded)

    def clock(self):
        return self.now


class Event:
    def __init__(self, device, number):
        self.device, self.number = device, number

    def query(self):
        self.device.asked += 1
        if self.device.has_failed:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.number <= self.device.finished


@pytest.fixture
def device(monkeypatch):
    found = Device()
    found.launches = DeviceLaunches(found.record, found.clock)
    monkeypatch.setattr(device_launches, "launches", found.launches)
    monkeypatch.setattr(device_watch, "_thread", object())  # tests look themselves
    return found


def name(launched):
    return launched and launched.what


def test_the_first_unfinished_collective_is_known(device):
    for what in ("a", "b", "c"):
        device.launches.add(what, (0, 1))
    assert "a" == name(device.launches.unfinished())
    device.finished = 2
    assert "c" == name(device.launches.unfinished())
    device.finished = 3
    assert device.launches.unfinished() is None


def test_a_device_that_has_failed_has_not_finished(device):
    device.launches.add("a", (0, 1))
    device.has_failed = True
    assert "a" == name(device.launches.unfinished())


def test_finished_collectives_are_forgotten_at_the_next_launch(device):
    for number in range(100):
        device.launches.add(str(number), (0, 1))
        device.finished = number
    assert len(device.launches._launched) < 4


def test_a_device_is_asked_by_other_threads_only_of_what_is_late(device):
    device.launches.add("a", (0, 1))
    device.now, asked = 9.0, device.asked
    assert device.launches.late(10.0) is None and asked == device.asked
    device.now = 11.0
    assert "a" == name(device.launches.late(10.0))
    device.launches.add("b", (0, 1))
    device.finished = 1
    assert device.launches.late(10.0) is None  # b is not


def test_without_an_event_nothing_is_noted():
    launches = DeviceLaunches(lambda: None)
    launches.add("a", (0, 1))
    assert launches.unfinished() is None


def test_a_captured_graph_has_no_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert device_launches.record() is None


class Received:
    """A result on a GPU, which needs no time to wait for: the host only tells the stream to."""

    is_cuda = True

    def view(self, *shape):
        return self

    def split(self, widths, dim):
        return [self] * len(widths)


SCOPE = CollectiveScope("all_reduce over data (sum at train.py:22)", (0, 1, 2, 3))


def exchanged(is_cuda=True):
    """An exchange of which the device has been told to wait for the result."""
    op = torch.ops._c10d_functional.all_reduce.default
    made = Exchange(op, (), lambda x: x, lambda x: x, sends=(1,), receives=(1,), scope=SCOPE)
    result = Received()
    result.is_cuda = is_cuda
    return made, result


@pytest.mark.parametrize("make", [lambda one: one, lambda one: Bucket((one, one), SCOPE)], ids=["exchange", "bucket"])
def test_a_collective_is_noted_once_the_stream_waits_for_it(device, monkeypatch, make):
    for module in (exchange, bucket):
        monkeypatch.setattr(module, "wait", lambda pending: pending)
    one, result = exchanged()
    make(one).finish(result)
    assert SCOPE.what == name(device.launches.unfinished())


def test_collectives_of_the_cpu_are_not_noted(device, monkeypatch):
    monkeypatch.setattr(exchange, "wait", lambda pending: pending)
    one, result = exchanged(is_cuda=False)
    one.finish(result)
    assert 0 == device.recorded


def test_a_process_reports_what_its_device_waits_in(device, monkeypatch):
    monkeypatch.setattr(failure_detector, "position", None)
    held = failure_detector.Round(0)
    assert failure_detector._whereabouts(held).startswith(failure_detector.AWAY)
    device.launches.add(SCOPE.what, SCOPE.ranks)
    assert f"waits in {SCOPE.what}" == failure_detector._whereabouts(held)
    monkeypatch.setattr(failure_detector, "position", "the comparison of ranks in distribute")  # where the host waits
    assert "waits in the comparison of ranks in distribute" == failure_detector._whereabouts(held)


class Detector:
    """The failure detector of a job in which rank 2 was killed."""

    def __init__(self):
        self.asked = []

    def ask(self, text):
        self.asked.append(text)
        return [text, text, None, text]


def test_who_is_missing_is_said_once_of_a_collective_that_is_late(device, monkeypatch):
    detector, said = Detector(), []
    monkeypatch.setattr(failure_detector, "current", lambda: detector)
    watch = DeviceWatch(device.launches, said.append)
    device.launches.add(SCOPE.what, SCOPE.ranks)
    device.now = 59.0
    watch.look(60.0)
    assert [] == said == detector.asked
    for device.now in (61.0, 62.0, 600.0):
        watch.look(60.0)
    assert [f"waits in {SCOPE.what}"] == detector.asked
    assert [
        f"SpmdError: {SCOPE.what} failed: rank 2 does not answer. A rank that does not answer was killed or stopped, "
        "or cannot be reached. (TimeoutError: the device has not finished it in 60 seconds)"
    ] == said


def test_the_watch_takes_the_timeout_of_the_job(monkeypatch):
    assert float("inf") == device_watch._limit()


def test_the_message_goes_to_stderr(capsys):
    device_watch._print("SpmdError: x")
    assert "[rank 0] SpmdError: x\n" == capsys.readouterr().err


def test_a_noted_collective_is_watched(device, monkeypatch):
    started = []
    monkeypatch.setattr(device_watch, "_thread", None)
    monkeypatch.setattr(device_watch.threading.Thread, "start", lambda thread: started.append(thread))
    for _ in range(2):
        device_watch.note(collective_scope.CollectiveScope("a", (0, 1)))
    assert ["spmd-device-watch"] == [thread.name for thread in started] and started[0].daemon


SCRIPT = """
import os, signal, threading, torch, spmd
from spmd import P
from spmd.job import device_launches, device_watch
from spmd.job.collective_scope import CollectiveScope

class Never:
    query = lambda self: False

mesh = spmd.make_mesh({"x": 2})
spmd.jit(lambda x: x.sum(), P("x"), P(), mesh=mesh)(torch.arange(4.0))
if spmd.process_index() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
told, say = threading.Event(), device_watch._print
device_watch._print = lambda text: (say(text), told.set())
device_watch._limit = lambda: 1.0
device_launches.launches = device_launches.DeviceLaunches(Never)
device_watch.note(CollectiveScope("all_reduce over x (sum at train.py:22)", (0, 1)))
told.wait(240)  # as a kernel that does not end
os._exit(0)
"""


@pytest.mark.faults
def test_a_killed_rank_is_named_while_the_main_thread_waits_for_its_device():
    job = local_job(2)
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **job, **paths, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        (_, error), _ = (rank.communicate(timeout=240) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert "[rank 0] SpmdError: all_reduce over x (sum at train.py:22) failed: rank 1 does not answer." in error
