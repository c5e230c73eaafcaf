"""Calls whose tensors are not contiguous, as views of larger or permuted tensors, through `spmd.jit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import attrs
import torch

from proofs.nn_sweep.call import SEED, Role, Trial
from proofs.op_sweep.cases import Case
from proofs.op_sweep.outcome import Outcome, Status, said_by
from proofs.op_sweep.placements import apart
from proofs.op_sweep.sweep import make_fx_traces
from spmd.api.jit import jit
from spmd.core.mesh import Mesh
from spmd.core.spec import P
from spmd.errors import TraceError


@attrs.frozen
class Memory:
    """A memory layout for a tensor: a contiguous holder of its elements, and a view of the holder in its shape."""

    holder: Callable[[torch.Tensor], torch.Tensor]
    view: Callable[[torch.Tensor, torch.Size], torch.Tensor]


def _transposed(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor.transpose(0, -1)


def _channels(tensor: torch.Tensor, *_: Any, source: int, to: int) -> torch.Tensor:
    return tensor.movedim(source, to) if tensor.ndim > 2 else tensor


MEMORY: Mapping[str, Memory] = MappingProxyType(
    {
        "transposed": Memory(_transposed, _transposed),
        "sliced": Memory(lambda tensor: torch.stack([tensor] * 2, -1), lambda holder, _: holder[..., 0]),
        "expanded": Memory(lambda tensor: tensor[:1], lambda holder, shape: holder.expand(shape)),
        "channels last": Memory(partial(_channels, source=1, to=-1), partial(_channels, source=-1, to=1)),
    }
)
"""Layouts of inputs and cotangents by name; parameters only get channels-last, as by `Module.to`."""


def sweep_memory(trial: Trial, mesh: Mesh, outcome: Outcome) -> None:
    """Run a call in every layout; the views are alternately passed as arguments and made inside the function."""
    outcome.calls += 1
    for number, (name, memory) in enumerate(MEMORY.items(), outcome.calls):
        variation = _variation(trial, name, memory, inside=number % 2 == 0)
        if variation is not None:
            _sweep_variation(variation, mesh, outcome)


def _variation(trial: Trial, name: str, memory: Memory, *, inside: bool) -> Trial | None:
    """The call in another layout; None if all of its tensors stay contiguous."""
    changed = [Role.INPUT, Role.COTANGENT, *([Role.PARAMETER] if name == "channels last" else [])]
    given = trial.case.tensors
    shapes = [
        tensor.shape if role in changed and tensor.ndim and _may_have(name, tensor) else None
        for role, tensor in zip(trial.roles, given, strict=True)
    ]

    def viewed(holders: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            holder if shape is None else memory.view(holder, shape)
            for holder, shape in zip(holders, shapes, strict=True)
        ]

    holders = tuple(
        tensor if shape is None else memory.holder(tensor).contiguous()
        for tensor, shape in zip(given, shapes, strict=True)
    )
    views = tuple(viewed(holders))
    if all(view.is_contiguous() for view in views):
        return None
    label, function = trial.case.label, trial.case.function
    if not inside:
        return Trial(Case(f"{label}: {name}", function, views), trial.roles)
    made = lambda *tensors: function(*viewed(tensors))  # noqa: E731
    return Trial(Case(f"{label}: {name} in the function", made, holders), trial.roles)


def _may_have(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor may have the layout: bag offsets and sequence lengths must not be made equal by expansion."""
    return name != "expanded" or tensor.is_floating_point()


def _sweep_variation(trial: Trial, mesh: Mesh, outcome: Outcome) -> None:
    """Run a call with parameters and buffers replicated, and inputs and cotangents sharded along their first dims."""
    case = trial.case
    try:
        expected = _run(case.function, case.tensors)
    except Exception as error:  # plain torch fails: there is nothing to compare with
        outcome.note(Status.SKIPPED, f"{case.label}: {said_by(error)}")
        return
    specs = tuple(
        P(*mesh.names) if role in (Role.INPUT, Role.COTANGENT) and tensor.ndim else P()
        for role, tensor in zip(trial.roles, case.tensors, strict=True)
    )
    outcome.combinations += 1
    try:
        placed = _run(jit(case.function, specs, P(), mesh=mesh), case.tensors)
        results = [result.full_tensor() for result in placed]
        reason = next(_differences(results, expected), None)
    except TraceError as error:
        outcome.refused += 1
        status = Status.REFUSED if make_fx_traces(case) else Status.UNTRACEABLE
        outcome.note(status, f"{case.label}: {said_by(error)}")
    except Exception as error:  # any error is counted, and the sweep continues
        outcome.errors += 1
        outcome.note(Status.ERROR, f"{case.label}: {said_by(error)}")
    else:
        contiguous = [tensor.contiguous() for tensor in case.tensors]
        if reason is not None and next(_differences(results, _run(case.function, contiguous)), None) is None:
            outcome.combinations -= 1
            outcome.note(Status.SKIPPED, f"{case.label}: plain torch gives other numbers if the tensors are contiguous")
            return
        outcome.wrong += reason is not None
        outcome.passed += reason is None
        outcome.note(Status.PASS if reason is None else Status.WRONG, f"{case.label}: {reason}" if reason else "")


def _run(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    torch.default_generator.manual_seed(SEED)
    return function(*tensors)


def _differences(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Iterator[str]:
    for index, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        reason = apart(found, wanted)
        if reason is not None:
            yield f"result {index}: {reason}"
