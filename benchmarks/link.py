"""Ranks of this machine with links of a chosen rate between them, each in a network namespace of its own.

Every rank has one interface, and a bridge joins them, as a switch would. Both directions of a link send through a token
bucket filter (tc) of the rate; nothing is added to the latency. It needs no privileges where users may make namespaces,
and the commands unshare, nsenter, ip and tc.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

INSIDE = "SPMD_LINK_NAMESPACE"
"""The environment variable that says that this process is root of a user namespace of its own."""

NAMESPACES = ("unshare", "--user", "--map-root-user", "--net")
ADDRESSES = "10.77.0"
PORT = 29577
SHAPE = ("burst", "256kb", "latency", "100ms")
"""Of the filter: bytes that pass at once, more than one segment of 64 KB, and how long a packet may wait."""

UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}
CLONE_NEWNET = 0x40000000


def bits_per_second(text: str) -> float:
    """A rate as tc writes it.

    >>> bits_per_second("1Gbit"), bits_per_second("250Mbit")
    (1000000000.0, 250000000.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG])bit", text)
    if found is None:
        raise ValueError(f"A rate must be a number and kbit, Mbit or Gbit, such as 1Gbit (got {text!r}).")
    return float(found[1]) * UNITS[found[2]]


def check() -> None:
    """Raise an OSError if the machine lacks a command, or does not allow namespaces."""
    missing = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]
    if missing:
        raise OSError(f"Links of a rate need the commands unshare, nsenter, ip and tc (missing: {', '.join(missing)}).")
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        raise OSError("Links of a rate need namespaces, and this machine does not allow a user to make them.")


def enter() -> None:
    """Start this script again as root of a user namespace, unless it runs in one.

    Raises:
        OSError: the machine lacks a command, or does not allow namespaces.
    """
    if os.environ.get(INSIDE):
        return
    check()
    sys.stdout.flush()
    changed = {INSIDE: "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch would warn that addresses have no names
    os.execvpe(NAMESPACES[0], [*NAMESPACES, sys.executable, *sys.orig_argv[1:]], os.environ | changed)


def launch(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Call a function in so many processes with links between them; what it returns on rank 0.

    Raises:
        RuntimeError: it failed on some rank; with the traceback of the first that did. The others are ended.
    """
    context = multiprocessing.get_context("spawn")
    _run("ip", "link", "add", "switch", "type", "bridge")
    _run("ip", "link", "set", "switch", "up")
    processes, connections = [], []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, ranks), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        for rank, (process, connection) in enumerate(zip(processes, connections, strict=True)):
            connection.recv()  # it is in its own namespace
            _run("ip", "link", "add", f"port{rank}", "type", "veth", "peer", "name", f"link{rank}")
            _run("ip", "link", "set", f"link{rank}", "netns", str(process.pid))
            _run("ip", "link", "set", f"port{rank}", "master", "switch", "up")
        for connection in connections:
            connection.send_bytes(pickle.dumps((function, args)))
        return _answers(connections)[0]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for name in (*(f"port{rank}" for rank in range(len(processes))), "switch"):
            subprocess.run(("ip", "link", "delete", name), capture_output=True)  # ports may be gone with their ranks


def _answers(connections: list[Connection]) -> list[Any]:
    """The results of all ranks."""
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        for ready in wait([found for rank, found in enumerate(connections) if rank not in results]):
            rank = connections.index(ready)
            try:
                error, result = pickle.loads(connections[rank].recv_bytes())
            except EOFError:
                error, result = "the process died", None
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
            results[rank] = result
    return [results[rank] for rank in range(len(connections))]


def _serve(connection: Connection, rank: int, ranks: int) -> None:
    """The life of a rank."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):  # of this thread, and of those that it starts
        raise OSError(ctypes.get_errno(), "unshare")
    connection.send("ready")
    function, args = pickle.loads(connection.recv_bytes())
    device = f"link{rank}"
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "add", f"{ADDRESSES}.{rank + 1}/24", "dev", device)
    _run("ip", "link", "set", device, "up")
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": f"{ADDRESSES}.1",
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": device,
        "TP_SOCKET_IFNAME": device,
    }
    try:
        answer: tuple[str, Any] = ("", function(*args))
    except BaseException:
        answer = (traceback.format_exc(), None)
    connection.send_bytes(pickle.dumps(answer))
    with contextlib.suppress(EOFError):
        connection.recv_bytes()  # a rank stays until all have answered


def throttle(rate: str | None) -> None:
    """Set the rate of this rank's link, both ways; None sets none."""
    rank = os.environ["RANK"]
    shape = ["tbf", "rate", rate, *SHAPE] if rate else ["pfifo"]
    _run("tc", "qdisc", "replace", "dev", f"link{rank}", "root", *shape)
    there = ("nsenter", f"--net=/proc/{os.getppid()}/ns/net")
    _run(*there, "tc", "qdisc", "replace", "dev", f"port{rank}", "root", *shape)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
