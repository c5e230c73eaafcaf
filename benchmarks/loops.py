"""An LSTM as a loop of the program: processor time of the first call and of a step, beside unrolled, torch and JAX.

Value and gradient of an LSTM cell over the rows of a sequence, by `spmd.scan` and as a Python loop that the trace
unrolls, on one rank and on two virtual ranks with the batch over them; the same loop in torch without `jit`; and in JAX
by `lax.scan` and unrolled, where `--jax` names a Python that has JAX. The process is warm: it has planned another loop
before. Rivals take turns, the least of all rounds counts, and times are processor time with one thread. The second
table is the cost of a trip of a `while_loop`, beside its operators in a program without a loop.

    python benchmarks/loops.py --jax /path/to/python/with/jax
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import spmd
from spmd import P

STEPS, UNROLLED, BATCH, WIDTH, ROUNDS = 500, 100, 8, 64, 5
JAX_UNROLLED = 20
"""Rows of JAX's unrolled loop: XLA compiles one of `UNROLLED` rows for minutes."""

TRIPS = 1000
"""Trips of the `while_loop`."""

MOST_SECONDS = 1.5
"""The most processor seconds of the first call of a loop over `STEPS` rows."""


@attrs.frozen
class Times:
    """The least processor seconds of a first call, and of a later one."""

    first: float
    step: float


def cell(params: dict[str, Tensor], state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One step, with torch's order of gates."""
    h, c = state
    gates = x @ params["inputs"] + h @ params["hidden"] + params["bias"]
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h, c), h


def by_scan(params: dict[str, Tensor], xs: Tensor) -> Tensor:
    """The loss, by one operation of the program."""
    start = torch.zeros_like(xs[0]), torch.zeros_like(xs[0])
    return spmd.scan(lambda state, x: cell(params, state, x), start, xs)[1].square().mean()


def by_python(params: dict[str, Tensor], xs: Tensor) -> Tensor:
    """The loss, by a loop of Python."""
    state, outputs = (torch.zeros_like(xs[0]), torch.zeros_like(xs[0])), []
    for x in xs.unbind():
        state, h = cell(params, state, x)
        outputs.append(h)
    return torch.stack(outputs).square().mean()


def arguments(steps: int) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters and a sequence."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator) / WIDTH**0.5  # noqa: E731
    params = {"inputs": normal(WIDTH, 4 * WIDTH), "hidden": normal(WIDTH, 4 * WIDTH), "bias": normal(4 * WIDTH)}
    return params, normal(steps, BATCH, WIDTH)


def seconds(call: Callable[[], object]) -> float:
    """The processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def jitted(loss: Callable[..., Tensor], ranks: int) -> Callable[..., Any]:
    """Value and gradient on a mesh of some ranks, with the batch over them."""
    mesh = spmd.make_mesh({"data": ranks}, runtime="virtual")
    return spmd.jit(torch.func.grad_and_value(loss), (P(), P(None, "data")), P(), mesh=mesh)


def lstm_times(rounds: int = ROUNDS, steps: int = STEPS, unrolled: int = UNROLLED) -> dict[str, Times]:
    """The times of each rival of this process."""
    eager = torch.func.grad_and_value(by_python)
    makers: dict[str, tuple[Callable[[], Callable[..., Any]], int]] = {}
    for ranks in (1, 2):
        where = f"{ranks} rank{'s' * (ranks > 1)}"
        makers[f"spmd.scan, {where}, {steps}"] = (lambda ranks=ranks: jitted(by_scan, ranks)), steps  # type: ignore[misc]
        makers[f"spmd.scan, {where}, {unrolled}"] = (lambda ranks=ranks: jitted(by_scan, ranks)), unrolled  # type: ignore[misc]
        makers[f"unrolled by jit, {where}, {unrolled}"] = (lambda ranks=ranks: jitted(by_python, ranks)), unrolled  # type: ignore[misc]
    makers[f"torch, {steps}"] = (lambda: eager), steps
    makers[f"torch, {unrolled}"] = (lambda: eager), unrolled
    jitted(by_scan, 2)(*arguments(3))
    functions, first = {}, {}
    for name, (make, count) in makers.items():
        functions[name], args = make(), arguments(count)
        first[name] = seconds(lambda name=name, args=args: functions[name](*args))  # type: ignore[misc]
        if "unrolled" not in name:
            again = make()
            first[name] = min(first[name], seconds(lambda again=again, args=args: again(*args)))  # type: ignore[misc]
    least = dict.fromkeys(makers, float("inf"))
    for _ in range(rounds):
        for name, (_, count) in makers.items():
            args = arguments(count)
            least[name] = min(least[name], seconds(lambda name=name, args=args: functions[name](*args)))  # type: ignore[misc]
    return {name: Times(first[name], least[name]) for name in makers}


def jax_times(python: Path, rounds: int = ROUNDS) -> dict[str, Times]:
    """The times of JAX, from a process of its own."""
    sizes = {"steps": STEPS, "unrolled": JAX_UNROLLED, "batch": BATCH, "width": WIDTH, "rounds": rounds}
    script = str(Path(__file__).with_name("jax_loops.py"))
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    done = subprocess.run([python, script, *options], capture_output=True, text=True, check=True)
    names = {"scan": f"lax.scan, {STEPS}", "unrolled": f"unrolled, {JAX_UNROLLED}"}
    return {f"JAX, {names[name]}": Times(**times) for name, times in json.loads(done.stdout).items()}


def trip_times(ranks: int, rounds: int = ROUNDS, trips: int = TRIPS) -> tuple[float, float]:
    """Seconds of a trip of a `while_loop`, and of its operators and the read of its predicate in a flat program."""
    mesh = spmd.make_mesh({"data": ranks}, runtime="virtual")
    x, w = torch.randn(BATCH, WIDTH), torch.eye(WIDTH) / 2

    def looped(x: Tensor, w: Tensor, first: Tensor, end: Tensor) -> Any:
        return spmd.while_loop(lambda s: s[0] < end, lambda s: (s[0] + 1, torch.tanh(s[1] @ w)), (first, x))

    def flat(x: Tensor, w: Tensor, i: Tensor, end: Tensor) -> Any:
        goes_on = []
        for _ in range(UNROLLED):
            goes_on.append(i < end)
            i, x = i + 1, torch.tanh(x @ w)
        return i, x, torch.stack(goes_on)

    loop, line = (spmd.jit(f, (P("data"), P(), P(), P()), mesh=mesh) for f in (looped, flat))
    none, all_of_them, predicate = torch.tensor(0), torch.tensor(trips), torch.tensor(True)
    calls: Sequence[Callable[[], object]] = (
        lambda: loop(x, w, none, all_of_them),
        lambda: loop(x, w, none, none),
        lambda: line(x, w, none, none),
        lambda: [bool(predicate) for _ in range(trips)],
    )
    least = [float("inf")] * len(calls)
    for _ in range(rounds + 1):
        least = [min(best, seconds(call)) for best, call in zip(least, calls, strict=True)]
    all_trips, no_trip, operators, reads = least
    return (all_trips - no_trip) / trips, (operators - no_trip) / UNROLLED + reads / trips


def main() -> int:
    """Print the tables; the exit status is 1 if the first call of the long loop takes more than `MOST_SECONDS`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jax", type=Path, help="a Python that has JAX")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = lstm_times(options.rounds)
    if options.jax is not None:
        times |= jax_times(options.jax, options.rounds)
    table = Table(title=f"LSTM, batch {BATCH}, width {WIDTH}: value and gradient", title_justify="left")
    for column in ("program, rows", "first call, s", "step, ms", "a row, us"):
        table.add_column(column, justify="left" if column.startswith("program") else "right")
    for name, row in times.items():
        rows = int(name.rpartition(" ")[2])
        table.add_row(name, f"{row.first:.2f}", f"{row.step * 1e3:.1f}", f"{row.step / rows * 1e6:.0f}")
    trips = Table(title="A trip of a while_loop", title_justify="left")
    for column in ("ranks", "in the loop, us", "in a flat program, us"):
        trips.add_column(column, justify="right")
    for ranks in (1, 2):
        trips.add_row(str(ranks), *(f"{found * 1e6:.1f}" for found in trip_times(ranks, options.rounds)))
    Console().print(table, trips)
    return int(any(row.first > MOST_SECONDS for name, row in times.items() if f"{STEPS}" in name and "spmd" in name))


if __name__ == "__main__":
    raise SystemExit(main())
