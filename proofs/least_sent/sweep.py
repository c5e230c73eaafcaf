"""Sweep over single calls: their plans at prices where only bytes count, beside the lower bound."""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from proofs.least_sent.bound import NUMBER, least_sent
from proofs.least_sent.dependence import Dependence, dependence, points_of
from proofs.least_sent.sizes import even_sizes
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

_LARGEST = 260
"""The most elements of the operands, or of the results, of a call: each is a row or a column of its derivative."""
_CONSIDERED = 500
"""The most combinations of placements of which some are chosen."""
_EXACT = 1e-6
"""The difference up to which two numbers of bytes are the same."""
LIMIT = 2.0
"""The ratio up to which a call counts as one that sends what it must."""


class Kind(enum.Enum):
    """What an entry's programs consist of."""

    POINTWISE = "pointwise operators"
    VIEW = "views"
    OTHER = "others"


@attrs.frozen
class Setting:
    """What is swept.

    Args:
        axes: the sizes of the mesh axes.
        even: whether all shards of a call have the same shape, or some do not.
        backward: with the gradients of all floating operands.
        samples: the most calls of an entry.
        placements: the most placements of the operands of a call.
    """

    axes: tuple[int, ...] = (2,)
    even: bool = True
    backward: bool = False
    samples: int = 3
    placements: int = 4

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return make_mesh(dict(zip("xyz", self.axes, strict=False)), runtime="virtual")

    @property
    def name(self) -> str:
        """Its name, of a section of the report."""
        shape = "x".join(map(str, self.axes))
        return f"{shape} ranks, {'even' if self.even else 'uneven'}{', with gradients' if self.backward else ''}"


SETTINGS = (
    Setting(),
    Setting(backward=True, samples=2),
    Setting((4,), samples=2),
    Setting((2, 2), samples=2),
    Setting(even=False, samples=2),
)
"""Those of the report."""


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
        kind: what its programs consist of.
        calls: the calls on placements that were planned.
        worst: the one with the largest ratio; None if there is no call.
        within: how many have a ratio of at most `LIMIT`.
        below: a call whose plan sends less than the bound, so that it is none; None if there is no such call.
        failure: why there is none, or why some are missing.
        is_random: whether a call is left out because its results are random.
    """

    name: str
    kind: Kind = Kind.OTHER
    calls: int = 0
    worst: Sent | None = None
    within: int = 0
    below: Sent | None = None
    failure: str = ""
    is_random: bool = False


def sweep_entry(entry: Any, setting: Setting = Setting()) -> Entry:
    """Compare what the plans of an operator's calls send with what must be sent."""
    found: list[Sent] = []
    failure, is_random, kinds = "", False, set()
    mesh = setting.mesh
    with even_sizes(mesh.size) if setting.even else contextlib.nullcontext():
        for case in cases(entry, setting.samples, setting.backward):
            try:
                if not case.values or _is_random(case):
                    is_random = True
                    continue
                kinds.add(kind_of(canonical(case)))
                found += sent_by(case, mesh, setting.placements, even=setting.even)
            except Exception as error:  # torch's own errors, and what is refused: the sweep of operators reports these
                failure = f"{type(error).__name__}: {error!s:.80}"
    worst = max(found, key=lambda sent: sent.ratio, default=None)
    kind = next((kind for kind in (Kind.OTHER, Kind.POINTWISE) if kind in kinds), Kind.VIEW)
    within = sum(sent.ratio <= LIMIT for sent in found)
    below = next((sent for sent in found if sent.numbers < sent.least - _EXACT), None)
    return Entry(full_name(entry), kind, len(found), worst, within, below, failure, is_random)


def kind_of(graph: Graph) -> Kind:
    """What a program consists of."""
    if all(operation.is_view for operation in graph.operations):
        return Kind.VIEW
    pointwise = all(o.is_view or torch.Tag.pointwise in getattr(o.op, "tags", ()) for o in graph.operations)
    return Kind.POINTWISE if pointwise else Kind.OTHER


def _is_random(case: Case) -> bool:
    results = []
    for number in (1, 2):
        torch.manual_seed(number)
        results.append(case.function(*case.tensors))
    return not all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in zip(*results, strict=True))


def sent_by(
    case: Case,
    mesh: Mesh,
    limit: int,
    rules: Mapping[torch._ops.OpOverload, Rule] = RULES,
    even: bool | None = None,
) -> Iterator[Sent]:
    """Compare plans of a call on some placements of its operands and results with the bound.

    Args:
        case: the call.
        mesh: the mesh.
        limit: the most placements of the operands.
        rules: the rules of all operators.
        even: for calls of which all shards are even, or some are not; None for both.
    """
    if not _is_bounded([TensorMeta.of(tensor) for tensor in case.tensors]):
        return
    graph = canonical(case)
    if not _is_bounded([value.meta for value in graph.outputs]):
        return
    combinations = itertools.islice(_combinations(case, graph, mesh, even), limit)
    found: Dependence | None = None
    for operands, results in itertools.chain.from_iterable(combinations):
        found = found or dependence(_seeded(case), list(points_of(case.tensors)))
        sent = sent_on(case, graph, found, operands, results, rules)
        if sent is not None:
            yield sent


def _seeded(case: Case) -> Any:
    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        seed()
        return case.function(*tensors)

    return function


def sent_on(
    case: Case,
    graph: Graph,
    found: Dependence,
    operands: Sequence[DTensorSpec],
    results: Sequence[DTensorSpec],
    rules: Mapping[torch._ops.OpOverload, Rule] = RULES,
) -> Sent | None:
    """Compare the plan of a call from some specs to others with the bound; None if there is no bound."""
    planned = plan(Request(graph, operands[0].mesh, operands, results, rules=rules, machine=BYTES_ONLY))
    numbers = sum(comm.bytes for comm in planned.comms) / NUMBER
    values = [value for operation in graph.operations for value in operation.results if value is not None]
    smallest = min([NUMBER, *(value.meta.dtype.itemsize for value in values)])
    least = least_sent(found, operands, results, smallest / NUMBER)
    if not least.is_known:
        return None
    specs = ", ".join(repr(spec.pspec) for spec in operands), ", ".join(repr(spec.pspec) for spec in results)
    return Sent(f"{case.label}: {specs[0]} -> {specs[1]}", numbers, least.numbers)


def _combinations(
    case: Case, graph: Graph, mesh: Mesh, even: bool | None
) -> Iterator[list[tuple[list[DTensorSpec], list[DTensorSpec]]]]:
    """Placements of the operands, each with those of the results."""
    for operands in _operands(case.tensors, mesh):
        both = [(operands, results) for results in _results(graph, operands, mesh)]
        chosen = [pair for pair in both if even is None or even == all(s.is_even for s in (*pair[0], *pair[1]))]
        if chosen:
            yield chosen


def _operands(tensors: Sequence[torch.Tensor], mesh: Mesh) -> Iterator[list[DTensorSpec]]:
    """Placements of which one shards a floating operand, in a random order; the others are replicated."""
    options = [_placements(x, mesh) if x.is_floating_point() else [P()] for x in tensors]
    count = math.prod(map(len, options))
    for number in random.Random(0).sample(range(count), min(count, _CONSIDERED)):
        chosen = []
        for places in options:
            number, at = divmod(number, len(places))
            chosen.append(places[at])
        if any(spec != P() for spec in chosen):
            yield [DTensorSpec.make(mesh, spec, TensorMeta.of(x)) for spec, x in zip(chosen, tensors, strict=True)]


def _placements(x: torch.Tensor, mesh: Mesh) -> list[P]:
    """Replicated, and along one dim on all axes; on several axes, also along a dim for each of two."""
    dims = [dim for dim in range(x.ndim) if x.shape[dim] > 1]
    found = [P(), *(P(*[None] * dim, mesh.names) for dim in dims)]
    if len(mesh.names) == 2:
        for chosen in itertools.permutations(dims, 2):
            axes = dict(zip(chosen, mesh.names, strict=True))
            found.append(P(*(axes.get(dim) for dim in range(x.ndim))))
    return found


def _results(graph: Graph, operands: Sequence[DTensorSpec], mesh: Mesh) -> Iterator[list[DTensorSpec]]:
    """The results replicated, and sharded like a sharded operand."""
    sharded = next(spec.pspec for spec in operands if not spec.is_replicated)
    for spec in (P(), sharded):
        chosen = [spec if value.meta.ndim >= len(spec.dims) else P() for value in graph.outputs]
        if spec == P() or spec in chosen:
            yield [DTensorSpec.make(mesh, s, v.meta) for s, v in zip(chosen, graph.outputs, strict=True)]


def _is_bounded(metas: Sequence[TensorMeta]) -> bool:
    """Test for few elements, of real numbers."""
    return sum(meta.numel for meta in metas) <= _LARGEST and not any(meta.dtype.is_complex for meta in metas)
