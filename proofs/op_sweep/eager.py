"""Runs one database entry on DTensors outside of `spmd.jit`, with gradients by `.backward()`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from proofs.op_sweep.cases import Case, dense_cases, has_gradient, is_differentiable
from proofs.op_sweep.expected import expected_of, seed
from proofs.op_sweep.outcome import Outcome, Status, said_by
from proofs.op_sweep.placements import Combination, apart, combination_text, combinations, difference, spread
from proofs.op_sweep.setups import Setup
from spmd.api.values.dtensor import DTensor, wrap
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import SpmdError

_NO_MEMORY = "its data is not allocated yet"
"""Torch says so of operators that read values by address (`tensor_split`), before any dispatch."""


def eager_cases(entry: object, setup: Setup) -> Iterator[Case]:
    """The calls of an entry; with `setup.backward` those that have gradients."""
    for case in dense_cases(entry, setup.samples, setup.backward, device=setup.device):
        if not setup.backward or (entry.supports_autograd and is_differentiable(case)):  # type: ignore[attr-defined]
            yield case


def sweep_eager_case(case: Case, mesh: Mesh, setup: Setup, outcome: Outcome) -> None:
    """Run one call with some placements of its tensors against plain torch."""
    wanted = _asked(case) if setup.backward else ()
    expected = expected_of(case, lambda: _run(case, case.tensors, wanted), outcome)
    if expected is None:
        return
    refused = False
    for combination in combinations(case.tensors, mesh, setup.limit, setup.partial):
        outcome.combinations += 1
        label = f"{case.label}: {combination_text(combination)}"
        try:
            reason = compare(_run(case, _placed(case, mesh, combination), wanted), expected, case.values)
        except Exception as error:
            is_refusal = isinstance(error, SpmdError) or _NO_MEMORY in str(error)
            refused |= is_refusal
            outcome.errors += not is_refusal
            outcome.note(Status.REFUSED if is_refusal else Status.ERROR, f"{label}: {said_by(error)}")
        else:
            outcome.passed += reason is None
            outcome.wrong += reason is not None
            outcome.note(
                Status.PASS if reason is None else Status.WRONG, "" if reason is None else f"{label}: {reason}"
            )
    outcome.refused += refused


def _placed(case: Case, mesh: Mesh, combination: Combination) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for tensor, placements in zip(case.tensors, combination, strict=True):
        spec = DTensorSpec.make(mesh, placements, TensorMeta.of(tensor))
        found.append(wrap(spec, spread(tensor, spec)))
    return found


def _asked(case: Case) -> tuple[int, ...]:
    """The operands whose gradients are compared: all floating ones if all have one, else `Case.asked`."""
    floating = tuple(n for n, x in enumerate(case.tensors) if has_gradient(x))
    try:
        _run(case, case.tensors, floating)
    except Exception:  # the statistics of a batch norm, the targets of some losses
        return case.asked
    return floating


def _run(case: Case, tensors: Sequence[torch.Tensor], wanted: Sequence[int]) -> list[torch.Tensor]:
    """The results of a call, and the gradients of some operands."""
    leaves = [tensor.detach().requires_grad_(n in wanted) for n, tensor in enumerate(tensors)]
    seed()
    results = case.function(*leaves)
    ends = [result for result in results if result.requires_grad]
    if wanted:
        torch.autograd.backward(ends, [cotangent(end) for end in ends])
    gradients = [leaves[n].grad for n in wanted]
    return [*(result.detach() for result in results), *(grad for grad in gradients if grad is not None)]


def cotangent(result: torch.Tensor) -> torch.Tensor:
    """Numbers that differ along each dim, laid out as a result is replicated."""
    whole = torch.randn(result.shape, dtype=result.dtype, generator=torch.Generator().manual_seed(1))
    whole = whole.to(result.device)
    if not isinstance(result, DTensor):
        return whole
    spec = DTensorSpec.replicated(result.mesh, TensorMeta.of(whole))
    return wrap(spec, spread(whole, spec))


def compare(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], values: bool) -> str | None:
    """The first difference of results from plain torch's; None if there is none."""
    if len(results) != len(expected):
        return f"{len(results)} results and gradients, expected {len(expected)}"
    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        if isinstance(result, DTensor):
            reason = difference(result.shards, result.spec, wanted, values)
        else:
            reason = apart(result, wanted) if values else None
        if reason is not None:
            return f"result {number}: {reason}"
    return None
