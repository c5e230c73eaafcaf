"""A script on virtual ranks and on one device: the same results, a program or two, and nothing that grows."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch

import spmd
from spmd.api.jit import Jitted
from spmd.core.pytree import tree_leaves

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem: path for path in sorted(Path(__file__).parent.glob("scripts/*.py"))}
GET_STARTED = "get_started"
PROGRAMS = {"decayed_rate": 3, "scheduler_rate": 3, "many_tensors": 3, "layered_settings": 3, "tables": 4}
"""The most programs of a function, where it reads more than two values in turn; else 2."""
SLACK_BYTES = 1 << 14
"""What the second run may add to live tensors."""
_FIRST_BLOCK = re.compile(r"^```python\n(# train\.py\n.*?)^```$", re.DOTALL | re.MULTILINE)


@attrs.frozen(eq=False)
class Run:
    """One run of a script.

    Args:
        results: the script's `results`, gathered; else its `loss`.
        programs: of each jitted function, how many were made.
        live: what it added to the bytes of all tensors, with the run before.
        first: processor seconds of all functions' first calls.
        step: the median of later calls.
        warned: the first lines of warnings.
    """

    results: list[Any]
    programs: tuple[int, ...]
    live: int
    first: float
    step: float
    warned: tuple[str, ...]


@attrs.frozen(eq=False)
class Report:
    """Two runs in one namespace, on virtual ranks and on one device."""

    name: str
    mesh: Sequence[Run]
    device: Sequence[Run]

    def problems(self) -> list[str]:
        """What is wrong, in words."""
        most, found = PROGRAMS.get(self.name, 2), []
        for number, (ours, truth) in enumerate(zip(self.mesh, self.device, strict=True), 1):
            if max(ours.programs) > most:
                found.append(f"run {number}: {max(ours.programs)} programs of a function, at most {most} expected")
            if (index := _first_difference(ours.results, truth.results)) is not None:
                found.append(f"run {number}: result {index} of {len(truth.results)} differs from one device's")
        kept = sum(dict(_memory(x) for x in tree_leaves(self.mesh[0].results) if isinstance(x, torch.Tensor)).values())
        if (growth := self.mesh[1].live - self.mesh[0].live - kept) > SLACK_BYTES:  # the first run's results are here
            found.append(f"the second run adds {growth:,} bytes of tensors")
        return found


class _Calls:
    """The processor seconds of calls, by function; calls inside of calls are part of them."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = {}
        self.functions: dict[int, Any] = {}
        self._is_inside = False

    def __call__(self, function: Any, call: Callable[[], Any]) -> Any:
        if self._is_inside:
            return call()
        self._is_inside, start = True, time.process_time()
        try:
            return call()
        finally:
            self._is_inside = False
            self.functions[id(function)] = function
            self.seconds.setdefault(id(function), []).append(time.process_time() - start)


@contextlib.contextmanager
def _on_ranks(calls: _Calls) -> Iterator[None]:
    plain = Jitted.__call__

    def timed(self: Jitted, *args: Any, **keywords: Any) -> Any:
        return calls(self, lambda: plain(self, *args, **keywords))

    with mock.patch.object(Jitted, "__call__", timed):
        yield


@contextlib.contextmanager
def _on_one_device(calls: _Calls) -> Iterator[None]:
    def jit(*positional: Any, **options: Any) -> Any:
        if not positional or not callable(positional[0]):
            return jit

        @functools.wraps(function := positional[0])
        def timed(*args: Any, **keywords: Any) -> Any:
            return calls(function, lambda: function(*args, **keywords))

        return timed

    with mock.patch.multiple(spmd, jit=jit, distribute=lambda tree, *_: tree):
        yield


def run(name: str, namespace: dict[str, Any], context: Callable[[_Calls], Any]) -> Run:
    """Run a script in a namespace, in float64."""
    path = SCRIPTS.get(name, ROOT / "docs" / "get_started.md")
    text = path.read_text()
    if name == GET_STARTED and (block := _FIRST_BLOCK.search(text)):
        text = block[1]
    calls, dtype = _Calls(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        printed = contextlib.redirect_stdout(io.StringIO())
        with context(calls), printed, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exec(compile(text, str(path), "exec"), namespace)
    finally:
        torch.set_default_dtype(dtype)
    results = [_plain(value) for value in namespace.get("results", [namespace.get("loss")])]
    programs = tuple(f.cache_info().misses for f in calls.functions.values() if isinstance(f, Jitted))
    later = [seconds for each in calls.seconds.values() for seconds in each[1:]]
    first = sum(each[0] for each in calls.seconds.values())
    del calls
    warned = tuple(str(warning.message).splitlines()[0] for warning in caught)
    return Run(results, programs or (0,), live_bytes(), first, statistics.median(later), warned)


def check(name: str) -> Report:
    """Run a script twice in one namespace on virtual ranks, and twice on one device."""
    runs = []
    for context in (_on_ranks, _on_one_device):
        namespace, before = {"__name__": "__main__"}, live_bytes()
        pair = [run(name, namespace, context) for _ in range(2)]
        runs.append([attrs.evolve(each, live=each.live - before) for each in pair])
    return Report(name, *runs)


def live_bytes() -> int:
    """The bytes of the storages of all plain tensors."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return sum(dict(map(_memory, tensors)).values())


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """The place and the bytes of a tensor's storage; none for one that a transform or a trace has left without."""
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if tensor.device.type == "cpu" else (0, 0)
    except (NotImplementedError, RuntimeError):
        return 0, 0


def _plain(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, spmd.DTensor) else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _first_difference(ours: list[Any], truth: list[Any]) -> int | None:
    if len(ours) != len(truth):
        return min(len(ours), len(truth))
    for index, (one, other) in enumerate(zip(ours, truth, strict=True)):
        try:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
        except AssertionError:
            return index
    return None
