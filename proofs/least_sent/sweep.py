"""Sweep over single calls: their plans at prices where only bytes count, beside the lower bound."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from proofs.least_sent.bound import least_sent
from proofs.op_sweep.cases import Case, cases, full_name
from proofs.op_sweep.expected import seed
from proofs.op_sweep.sweep import canonical
from spmd.core.mesh import Mesh, make_mesh
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.ir.graph import Graph
from spmd.plan.data.request import Request
from spmd.plan.machine.machine import Machine
from spmd.plan.search.orders import plan
from spmd.rules import RULES
from spmd.rules.rule import Rule

BYTES_ONLY = Machine(flops=1e24, memory_bandwidth=1e24, link_bandwidth=1e6, latency=0.0)
"""Prices at which a plan sends as little as its rules can."""

_NUMBER = 8
"""The bytes of a number: all is computed in float64."""
_LARGEST = 260
"""The most elements of the operands, or of the results, of a call: each is a row or a column of its derivative."""
LIMIT = 2.0
"""The ratio up to which a call counts as one that sends what it must."""


@attrs.frozen
class Sent:
    """A call on placements: what its plan sends, and the bound.

    Args:
        label: the call, and the specs of its operands and results.
        numbers: what a rank sends.
        least: what it must send.
    """

    label: str
    numbers: float
    least: float

    @property
    def ratio(self) -> float:
        """The one over the other."""
        return 1.0 if self.numbers <= self.least else self.numbers / self.least if self.least else math.inf


@attrs.frozen
class Entry:
    """An operator of torch's database.

    Args:
        name: its name.
        calls: the calls on placements that were planned.
        worst: the one with the largest ratio; None if there is no call.
        within: how many have a ratio of at most `LIMIT`.
        failure: why there is none, or why some are missing.
    """

    name: str
    calls: int = 0
    worst: Sent | None = None
    within: int = 0
    failure: str = ""


def sweep_entry(entry: Any, ranks: int = 2, samples: int = 3, limit: int = 4, backward: bool = False) -> Entry:
    """Compare what the plans of an operator's calls send with what must be sent."""
    found, failure = [], ""
    mesh = make_mesh({"x": ranks}, runtime="virtual")
    for case in cases(entry, samples, backward):
        try:
            found += list(sent_by(case, mesh, limit))
        except Exception as error:  # torch's own errors, and what is refused: the sweep of operators reports these
            failure = f"{type(error).__name__}: {error!s:.80}"
    worst = max(found, key=lambda sent: sent.ratio, default=None)
    return Entry(full_name(entry), len(found), worst, sum(sent.ratio <= LIMIT for sent in found), failure)


def sent_by(case: Case, mesh: Mesh, limit: int, rules: Mapping[torch._ops.OpOverload, Rule] = RULES) -> Iterator[Sent]:
    """Compare plans of a call on some placements of its operands and results with the bound."""
    if not _is_bounded([TensorMeta.of(tensor) for tensor in case.tensors]):
        return
    graph = canonical(case)
    if not _is_bounded([value.meta for value in graph.outputs]):
        return
    points = [_point(case.tensors, number) for number in range(3)]
    for operands in _operands(case.tensors, mesh, limit):
        for results in _results(graph, operands, mesh):
            found = sent_on(case, graph, points, operands, results, rules)
            if found is not None:
                yield found


def sent_on(
    case: Case,
    graph: Graph,
    points: Sequence[Sequence[torch.Tensor]],
    operands: Sequence[DTensorSpec],
    results: Sequence[DTensorSpec],
    rules: Mapping[torch._ops.OpOverload, Rule] = RULES,
) -> Sent | None:
    """Compare the plan of a call from some specs to others with the bound; None if there is no bound."""

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        seed()
        return case.function(*tensors)

    found = plan(Request(graph, operands[0].mesh, operands, results, rules=rules, machine=BYTES_ONLY))
    numbers = sum(comm.bytes for comm in found.comms) / _NUMBER
    least = least_sent(function, points, operands, results)
    if not least.is_known:
        return None
    specs = ", ".join(repr(spec.pspec) for spec in operands), ", ".join(repr(spec.pspec) for spec in results)
    return Sent(f"{case.label}: {specs[0]} -> {specs[1]}", numbers, least.numbers)


def _point(tensors: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    """The operands, or others near them."""
    generator = torch.Generator().manual_seed(number)

    def moved(x: torch.Tensor) -> torch.Tensor:
        if not number or not x.is_floating_point():
            return x
        return x * (1 + 0.3 * torch.randn(x.shape, dtype=x.dtype, generator=generator))

    return [moved(tensor) for tensor in tensors]


def _operands(tensors: Sequence[torch.Tensor], mesh: Mesh, limit: int) -> Iterator[list[DTensorSpec]]:
    """Some placements of which one shards a floating operand; the others are replicated."""
    options = [
        [P(), *(P(*[None] * dim, "x") for dim in range(x.ndim) if x.shape[dim] > 1)] if x.is_floating_point() else [P()]
        for x in tensors
    ]
    every = [chosen for chosen in itertools.islice(itertools.product(*options), 500) if any(p != P() for p in chosen)]
    for chosen in random.Random(0).sample(every, min(limit, len(every))):
        yield [DTensorSpec.make(mesh, spec, TensorMeta.of(x)) for spec, x in zip(chosen, tensors, strict=True)]


def _results(graph: Graph, operands: Sequence[DTensorSpec], mesh: Mesh) -> Iterator[list[DTensorSpec]]:
    """The results replicated, and sharded along the dim of a sharded operand."""
    dim = next(n for spec in operands for n, axes in enumerate(spec.dims) if axes)
    for spec in (P(), P(*[None] * dim, "x")):
        chosen = [spec if value.meta.ndim > dim else P() for value in graph.outputs]
        if spec == P() or spec in chosen:
            yield [DTensorSpec.make(mesh, s, v.meta) for s, v in zip(chosen, graph.outputs, strict=True)]


def _is_bounded(metas: Sequence[TensorMeta]) -> bool:
    """Test for few elements, of real numbers."""
    return sum(meta.numel for meta in metas) <= _LARGEST and not any(meta.dtype.is_complex for meta in metas)
