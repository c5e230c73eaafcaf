"""What the ranks of tests/job/test_call_checks.py do: from the second call on, rank 1 does something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

import spmd
from spmd import P


def diverge(name: str, check: Literal["first", "calls"]) -> tuple[str, int]:
    """The error that a rank raises after the first calls, and how many calls it has made by then; no rank ends."""
    mesh, on = spmd.make_mesh({"data": 2, "model": 2}, runtime="distributed"), spmd.process_index() == 1
    spmd.init(check=check)
    torch.manual_seed(0)
    calls = Calls(mesh)
    message = "nothing"
    try:
        (ALWAYS | LATER)[name](calls, on)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    spmd.init(check="first")
    assert 8.0 == calls.x.full_tensor().sum().item()  # the next call works
    return message, calls.count


class Calls:
    """Jitted functions of equal shapes that all ranks have called, their arguments, and a count of calls that ran."""

    def __init__(self, mesh: spmd.Mesh) -> None:
        self.mesh, self.count = mesh, 0
        self.x = spmd.distribute(torch.ones(8), P("data"), mesh)
        self.w = spmd.distribute(torch.ones(8), P(), mesh)
        functions = (step, evaluate, *(times(number) for number in (2, 3)), dropped)
        self.step, self.evaluate, self.double, self.triple, self.dropped = (
            spmd.jit(function, (P("data"), P()), P(), mesh=mesh) for function in functions
        )
        self.power = spmd.jit(power, (P("data"),), P("data"), mesh=mesh, static_argnums=1)
        for function in (self.step, self.evaluate, self.double, self.triple, self.dropped):
            self(function, self.x, self.w)
        for exponent in (2, 3):
            self(self.power, self.x, exponent)
        self.count = 0

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        result = function(*args)
        self.count += 1
        return result


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).sum()


def evaluate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x - w).square().sum()


def times(number: int) -> Callable[..., torch.Tensor]:
    return lambda x, w: (x * w * number).sum()


def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * torch.nn.functional.dropout(w)).sum()


def power(x: torch.Tensor, exponent: int) -> torch.Tensor:
    return x / (x**exponent).sum()


def _functions_later(calls: Calls, on: bool) -> None:
    for function in (calls.evaluate, calls.step) if on else (calls.step, calls.evaluate):
        calls(function, calls.x, calls.w)  # functions


def _closures_later(calls: Calls, on: bool) -> None:
    calls(calls.triple if on else calls.double, calls.x, calls.w)


def _static_later(calls: Calls, on: bool) -> None:
    calls(calls.power, calls.x, 3 if on else 2)


def _number_later(calls: Calls, on: bool) -> None:
    scaled = spmd.jit(lambda x, by: (x * by).sum(), mesh=calls.mesh)
    for by in (0.5, 0.25):
        assert 8 * by == calls(scaled, calls.x, by).item()
    calls(scaled, calls.x, 2.0 if on else 3.0)


def _number_first(calls: Calls, on: bool) -> None:
    calls(spmd.jit(lambda x, by: (x * by).sum(), mesh=calls.mesh), calls.x, 2.0 if on else 3.0)


def _skipped_later(calls: Calls, on: bool) -> None:
    for batch in range(3):
        if not (on and batch == 1):
            calls(calls.step, calls.x, calls.w)
    calls(calls.evaluate, calls.x, calls.w)


def _last_skipped_later(calls: Calls, on: bool) -> None:
    for _ in range(2 if on else 3):
        calls(calls.step, calls.x, calls.w)
    calls.x.full_tensor()


def _plain_later(calls: Calls, on: bool) -> None:
    calls(calls.step, torch.ones(8), torch.full((8,), 1.0 + on))


def _sharded_plain_later(calls: Calls, on: bool) -> None:
    calls(calls.step, torch.full((8,), 1.0 + on), calls.w)


def _replica_later(calls: Calls, on: bool) -> None:
    w = spmd.distribute(torch.ones(8), P(), calls.mesh)
    if on:
        w.to_local()[3] += 1e-6
    calls(calls.step, calls.x, w)


def _replica_along_an_axis_later(calls: Calls, on: bool) -> None:
    x = spmd.distribute(torch.ones(8), P("data"), calls.mesh)
    if on:
        x.to_local().neg_()
    calls(calls.step, x, calls.w)


def _generator_later(calls: Calls, on: bool) -> None:
    if on:
        torch.rand(())
    calls(calls.step, calls.x, calls.w)  # draws nothing
    calls(calls.dropped, calls.x, calls.w)


def _shape_later(calls: Calls, on: bool) -> None:
    calls(calls.step, torch.ones(7 if on else 8), torch.ones(7 if on else 8))


def _spec_later(calls: Calls, on: bool) -> None:
    calls(calls.step, calls.w if on else calls.x, calls.w)


def _settings_later(calls: Calls, on: bool) -> None:
    with torch.autocast("cpu", enabled=on):
        calls(calls.step, calls.x, calls.w)


def _gradient_later(calls: Calls, on: bool) -> None:
    w = calls.w.detach().requires_grad_()
    calls(calls.step, calls.x, w).backward()
    calls(calls.evaluate if on else calls.step, calls.x, w).backward()


def _compiled_later(calls: Calls, on: bool) -> None:
    compiled = [calls.step.compile(calls.x, calls.w), calls.evaluate.compile(calls.x, calls.w)]
    calls(compiled[on], calls.x, calls.w)


def _local_later(calls: Calls, on: bool) -> None:
    spmd.DTensor.from_local(torch.full((4,), 1.0 + on), calls.mesh, P("data"))


def _no_data_later(calls: Calls, on: bool) -> None:
    calls(calls.step, torch.ones(8, device="meta") if on else torch.ones(8), calls.w)


def _other_check_later(calls: Calls, on: bool) -> None:
    if on:
        spmd.init(check="first")
        calls.x.full_tensor()
    calls(calls.step, calls.x, calls.w)


def _loaded(calls: Calls, on: bool) -> None:
    spmd.from_process_data({"w": torch.full((8,), 1.0 + on)}, P(), calls.mesh)


def _loaded_along_an_axis(calls: Calls, on: bool) -> None:
    spmd.from_process_data(torch.full((4,), spmd.process_index() // 2 + 0.5 * on), P("data"), calls.mesh)


def _order(calls: Calls, on: bool) -> None:
    for function in (calls.double, calls.triple) if on else (calls.triple, calls.double):
        calls(function, calls.x, calls.w)
    calls.x.full_tensor()


LATER: dict[str, Callable[[Calls, bool], None]] = {
    "functions": _functions_later,
    "closures": _closures_later,
    "static argument": _static_later,
    "number": _number_later,
    "skipped": _skipped_later,
    "last skipped": _last_skipped_later,
    "plain": _plain_later,
    "sharded plain": _sharded_plain_later,
    "replica": _replica_later,
    "replica along an axis": _replica_along_an_axis_later,
    "generator": _generator_later,
    "shape": _shape_later,
    "spec": _spec_later,
    "settings": _settings_later,
    "gradient": _gradient_later,
    "compiled": _compiled_later,
    "local": _local_later,
    "no data": _no_data_later,
    "other check": _other_check_later,
}

ALWAYS: dict[str, Callable[[Calls, bool], None]] = {
    "loaded": _loaded,
    "loaded along an axis": _loaded_along_an_axis,
    "order": _order,
    "number first": _number_first,
}
"""What is told without the mode, too."""
