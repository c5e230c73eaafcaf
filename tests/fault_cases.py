"""What the ranks of tests/job/test_faults.py do: one of them goes wrong. Each rank imports it: a light module."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data._utils import signal_handling

import spmd
from spmd import P
from spmd.collectives.transport import exchange
from spmd.collectives.transport.process_groups import process_group
from spmd.job import failure_detector
from spmd.plan.machine.default import agree_on_machine

PATIENT, TIMEOUT = 360.0, 8.0
"""Seconds that a collective waits: before the fault, for a machine may be busy, and then."""

START = 15.0
"""Seconds that a rank waits for one that never starts."""


def rank(
    case: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    environment: dict[str, str],
    together: Barrier,
    sender: Connection,
) -> None:
    """The life of a rank, as that of a script: it sends how it ended. All that are started begin together."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    together.wait(PATIENT)
    try:
        spmd.init(timeout=timeout)
        case(*args)
    except SystemExit as error:
        sender.send(f"SystemExit: {error}")
        raise
    except BaseException as error:
        sender.send(f"{type(error).__name__}: {error}")
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    sender.send("")


def steps() -> Any:
    """A jitted function with several collectives, and its argument; all ranks have run it once, and wait less now."""
    mesh = spmd.make_mesh({"data": spmd.process_count()})
    x = spmd.distribute(torch.ones(64, 8), P("data"), mesh)
    step = spmd.jit(center, P("data"), P("data"), mesh=mesh)
    x = step(x)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), dist.group.WORLD)
    return step, x


def center(x: torch.Tensor) -> torch.Tensor:
    x = x - x.mean(0)
    return x / x.square().mean()


def run_until(fails: Callable[[], object], on: int) -> None:
    """Take steps until one rank fails in one of them."""
    step, x = steps()
    if spmd.process_index() == on:
        threading.Timer(0.2, fails).start()
    while True:
        step(x)


def killed(on: int) -> None:
    run_until(lambda: os.kill(os.getpid(), signal.SIGKILL), on)


def stopped(on: int) -> None:
    run_until(lambda: os.kill(os.getpid(), signal.SIGSTOP), on)


def stuck(on: int) -> None:
    step, x = steps()
    if spmd.process_index() == on:
        time.sleep(PATIENT)  # stuck
    step(x)


def raises_between_steps(on: int) -> None:
    step, x = steps()
    if spmd.process_index() == on:
        raise ValueError("no such file")
    step(x)


def raises_in_function(on: int) -> None:
    _, x = steps()

    def function(x: torch.Tensor) -> torch.Tensor:
        if spmd.process_index() == on:
            raise ValueError("no such layer")
        return center(x)

    spmd.jit(function, P("data"), P("data"), mesh=x.mesh)(x)


def position_out_of_range(on: int) -> None:
    """A label beyond the vocabulary in the batch of one rank."""
    _, x = steps()
    loss = spmd.jit(lambda table, ids: table[ids].sum(), (P(), P("data")), P(), mesh=x.mesh)
    ids, table = torch.zeros(64, dtype=torch.int64), torch.ones(10, 2)
    loss(table, ids)
    ids[16 * on] = 10
    loss(table, ids)


def returns(on: int) -> None:
    step, x = steps()
    while spmd.process_index() != on:
        step(x)


def exits(on: int) -> None:
    step, x = steps()
    while True:
        try:
            step(read_part(x, on))
        except ValueError:
            sys.exit(1)


def read_part(x: Any, on: int) -> Any:
    if spmd.process_index() == on:
        raise ValueError("no such file")
    return x


def fails_after_another(first: int, fails: Callable[[], object], on: int) -> None:
    """A rank comes too late to a collective of two, which both survive; later one of the others fails."""
    mesh = spmd.make_mesh({"data": 2, "model": 2})
    x = spmd.distribute(torch.ones(8, 8), P("data", "model"), mesh)
    pair = spmd.jit(lambda x: x - x.sum(1, keepdim=True), P("data", "model"), P("data", "model"), mesh=mesh)
    both = spmd.jit(center, P("data", "model"), P("data", "model"), mesh=mesh)
    y = both(pair(x))
    dist.barrier()
    model = process_group(mesh, ("model",))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), model)
    if spmd.process_index() // 2 == first // 2:
        if spmd.process_index() == first:
            wait_until_asked()
        try:
            pair(x)
        except spmd.SpmdError as error:
            assert f"rank {first} is in no collective" in str(error) or spmd.process_index() == first, error
        else:
            raise AssertionError("nobody was late")
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENT), model)  # a process that ends is seen at once
    if spmd.process_index() == on:
        fails()
    while True:
        both(y)


def wait_until_asked() -> None:
    """Be in no collective until another rank's has failed, and all have said where they are."""
    detector, deadline = failure_detector.current(), time.monotonic() + PATIENT
    while detector is not None and detector._known is None and time.monotonic() < deadline:
        time.sleep(0.1)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("no such file")


def out_of_memory(on: int) -> None:
    """An accelerator's allocator fails in a collective, as that of a stand-in."""

    def allocate(pending: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    step, x = steps()
    if spmd.process_index() == on:
        exchange.wait = allocate
    while True:
        step(x)


def out_of_host_memory(on: int) -> None:
    """The allocator of the CPU fails in a collective: what is gathered does not fit."""
    mesh = spmd.make_mesh({"data": spmd.process_count()})
    gather = spmd.jit(lambda x: x + 1, P("data"), P(), mesh=mesh)
    gather(torch.ones(8, 8))
    x = spmd.DTensor.from_local(torch.ones(1 << 22), mesh, P("data"))
    gather(x)
    if spmd.process_index() == on:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), resource.RLIM_INFINITY))
    while True:
        gather(x)


def interrupted(on: int, fails_with: Callable[[], Callable[[], object]]) -> None:
    """While a rank waits for the others in a step, a handler of a signal fails; the step itself succeeds."""
    step, x = steps()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENT), dist.group.WORLD)
    if spmd.process_index() == on:
        fails = fails_with()  # held: a worker that nobody holds is reaped, and no handler sees how it ended
        threading.Timer(0.5, fails).start()
    else:
        time.sleep(2.0)
    while True:
        step(x)


def two_threads() -> None:
    """Two threads of each rank make steps at once."""
    step, x = steps()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), dist.group.WORLD)
    errors: list[Exception] = []

    def train() -> None:
        try:
            while not errors:
                step(x)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    step(x)


def handler_that_fails() -> Callable[[], object]:
    def handler(*_: object) -> None:
        raise RuntimeError("the machine is wanted by others")

    signal.signal(signal.SIGUSR1, handler)
    return lambda: os.kill(os.getpid(), signal.SIGUSR1)


def loader_with_a_worker() -> Callable[[], object]:
    """What a DataLoader does for a worker, which only sleeps here: a fork of a process with threads may hang."""
    worker = subprocess.Popen(["sleep", "600"])
    signal_handling._set_worker_pids(1, (worker.pid,))
    signal_handling._set_SIGCHLD_handler()
    return worker.kill


def other_argument_later(on: int) -> None:
    step, x = steps()
    step(torch.ones(60, 8) if spmd.process_index() == on else x)


def other_call_later(on: int) -> None:
    step, x = steps()
    if spmd.process_index() == on:
        spmd.distribute(torch.ones(8), P(), x.mesh)
    step(x)


def full_tensor_later(on: int) -> None:
    step, x = steps()
    if spmd.process_index() == on:
        x.full_tensor()
    step(x)


def ends_a_call_early(on: int) -> None:
    spmd.init(check="calls")
    step, x = steps()
    for _ in range(1 if spmd.process_index() == on else 2):
        step(x)


def leave_pid(folder: str) -> None:
    Path(folder, f"pid{spmd.process_index()}").write_text(str(os.getpid()))


def launched(case: Callable[..., Any], on: int, folder: str) -> None:
    """A case under `spmd.launch`, of which the test knows the processes."""
    spmd.init(timeout=PATIENT)
    leave_pid(folder)
    case(on)


def strided() -> torch.Tensor:
    """A tensor of one element, which on one rank has another stride."""
    mesh = spmd.make_mesh({"x": 4}, runtime="distributed")
    wide = torch.ones(2, dtype=torch.complex64)
    x = wide[::2] if spmd.process_index() == 1 else wide[:1]
    whole = spmd.distribute(x, P(), mesh).full_tensor()
    parts = spmd.DTensor.from_local(x, mesh, P("x"))
    return parts.redistribute(P()).full_tensor().sum(0, keepdim=True) / 4 * whole


def diverge(name: str) -> str:
    """The error that a call raises which is not the same on rank 1; no rank ends."""
    mesh, on = spmd.make_mesh({"x": 4}, runtime="distributed"), spmd.process_index() == 1
    x = spmd.distribute(torch.ones(8), P("x"), mesh)
    agree_on_machine(mesh, "a test")  # else the first test to run would do it in the call that differs
    try:
        DIVERGENT[name](mesh, x, on)
    except Exception as error:
        with suppress(AttributeError):
            x.full_tensor()  # the next call works
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _function(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    spmd.jit(torch.sin if on else torch.cos, P("x"), P("x"), mesh=mesh)(x)


def _body(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    spmd.jit(lambda x: (x * 2 + (3 if on else 4)).sum(), P("x"), P(), mesh=mesh)(x)


def _shapes(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    spmd.jit(lambda x: x * 2, P("x"), P("x"), mesh=mesh)(torch.ones(7 if on else 8))


def _dtypes(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    spmd.jit(lambda x: x * 2, P("x"), P("x"), mesh=mesh)(torch.ones(8, dtype=torch.float64 if on else None))


def _specs(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    spmd.jit(lambda x: x * 2, P("x"), P() if on else P("x"), mesh=mesh)(x)


def _constants(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    constant = torch.full((8,), 2.0 + on)
    spmd.jit(lambda x: x * constant, P("x"), P("x"), mesh=mesh)(x)


def _mesh(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    other = spmd.make_mesh({"x": 2, "y": 2} if on else {"x": 4}, runtime="distributed")
    spmd.jit(lambda x: x * 2, P("x"), P("x"), mesh=other)(torch.ones(8))


def _mesh_of_data(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    other = spmd.make_mesh({"y": 4} if on else {"x": 4}, runtime="distributed")
    spmd.distribute(torch.ones(8), P(), other)


def _calls(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    spmd.distribute(x, P("x"), mesh) if on else spmd.jit(lambda x: x * 2, P("x"), P("x"), mesh=mesh)(x)


def _save(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    spmd.checkpoint.save(x, "nowhere") if on else spmd.distribute(torch.ones(8), P("x"), mesh)


def _moves(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    x.full_tensor() if on else x.redistribute(P())


def _local_spec(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    spmd.DTensor.from_local(torch.ones(2), mesh, P() if on else P("x"))


def _prefix(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    spmd.distribute({"w": torch.ones(8)}, {"v": P()} if on else P(), mesh)


def _argument(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    replicated = spmd.distribute(torch.ones(8), P(), mesh)
    spmd.jit(lambda x: x * 2, P("x"), P("x"), mesh=mesh)(replicated if on else x)


def _raise(on: bool) -> None:
    if on:
        raise ValueError("no such layer")


def _error_in_function(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    spmd.jit(lambda x: (_raise(on), x)[1], P("x"), P("x"), mesh=mesh)(x)


def _error_in_plan(mesh: spmd.Mesh, x: spmd.DTensor, on: bool) -> None:
    spmd.jit(lambda x: x.sum(), P("x"), P(), mesh=mesh, comms="error" if on else "allow")(x)


DIVERGENT: dict[str, Callable[[spmd.Mesh, spmd.DTensor, bool], None]] = {
    "function": _function,
    "body": _body,
    "shapes": _shapes,
    "dtypes": _dtypes,
    "specs": _specs,
    "constants": _constants,
    "mesh": _mesh,
    "mesh of data": _mesh_of_data,
    "calls": _calls,
    "save": _save,
    "moves": _moves,
    "local spec": _local_spec,
    "prefix": _prefix,
    "argument": _argument,
    "error in function": _error_in_function,
    "error in plan": _error_in_plan,
}

# Ranks are forks of a process that has imported this; what tracing imports need not be read again by each of them.
spmd.jit(center, P("data"), P("data"), mesh=spmd.make_mesh({"data": 4}, runtime="abstract")).lower(torch.empty(4, 8))


def fails_in_a_submesh(fails: Callable[[], object], on: int) -> None:
    """A rank of one of two meshes fails; those of the other one go on, and wait for it later, in a call of all."""
    halves = [spmd.make_mesh({"data": 2}, ranks=ranks) for ranks in (range(2), range(2, 4))]
    every, mesh = spmd.make_mesh({"data": 4}), halves[spmd.process_index() // 2]
    x = spmd.distribute(torch.ones(8, 8), P("data"), every)
    own = spmd.distribute(torch.ones(8, 8), P("data"), mesh)
    steps = [spmd.jit(center, P("data"), P("data"), mesh=where) for where in (every, mesh)]
    x, own = steps[0](x), steps[1](own)
    dist.barrier()
    for group in (dist.group.WORLD, process_group(mesh, ("data",))):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), group)
    if spmd.process_index() == on:
        fails()
    for _ in range(20 if spmd.process_index() // 2 != on // 2 else 1):
        own = steps[1](own)
    steps[0](x)
