"""Plans a program by both searches, compares the plans, and runs both on virtual ranks against one device."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NoReturn
from unittest import mock

import attrs
import torch

from proofs.fuzz.check import difference
from proofs.fuzz.one_device import OneDevice
from proofs.fuzz.program import default_dtype
from proofs.repeated_layers.equal_layers import ties
from proofs.repeated_layers.programs import Repeated, program
from spmd import distribute
from spmd.api.programs import stages
from spmd.api.values.dtensor import DTensor, wrap
from spmd.collectives.traffic import record_traffic
from spmd.core.pytree import tree_leaves
from spmd.errors import PlanError
from spmd.inspect.plan import Plan
from spmd.lowering.lower import lower
from spmd.plan.cost.account import account
from spmd.plan.data.request import Request
from spmd.plan.memory.peak import memory_of
from spmd.plan.search.options import SEARCH, SearchOptions
from spmd.plan.search.orders import plan
from spmd.runtime.virtual import VirtualProgram
from spmd.testing.traffic import comms_differences

FOLDED = SEARCH
WHOLE = attrs.evolve(SEARCH, fold=False)
"""The search of every layer."""

SAME = 1e-3
"""The largest relative distance of predicted seconds at which two plans count as equally fast."""

_OF_SUMS = 1e-9
"""The largest relative distance of two sums of the same numbers in another order."""

_MOST_LIMITED = 400
"""The most operations of a program that is planned under a memory limit, for which a search is repeated many times."""


class Verdict(str, Enum):
    """The result of a program: of the plan of the folded search, beside that of the search of every layer."""

    EQUAL = "equal"
    BETTER = "better"
    WORSE = "worse"
    REFUSED = "refused by both"
    REFUSED_ONCE = "refused by one"
    WRONG = "wrong"
    CRASH = "crash"
    HANG = "hang"


ERRORS = (Verdict.REFUSED_ONCE, Verdict.WRONG, Verdict.CRASH, Verdict.HANG)


@attrs.frozen
class Figures:
    """The figures of one plan.

    Args:
        seconds: predicted seconds of its operations and collectives, and `step` where these pass beside each other.
        bytes: sent per rank.
        collectives: their number.
        peak: bytes that a rank holds at once.
        gap: the bound of its distance from the optimum that the plan states.
        search: processor seconds of planning.
    """

    seconds: float
    step: float
    bytes: float
    collectives: int
    peak: int
    gap: float
    search: float


@attrs.frozen
class Compared:
    """The findings about a program.

    Args:
        seed, name: the program.
        verdict: the result.
        message: of an error.
        operations: of the program; `repeated` of them are in a layer between the first and the last of a run.
        whole, folded: the figures of the two plans, if both were made.
        identical: whether the plans are the same, operation by operation.
        bits: whether the plans, which run the same collectives, computed the same bits; None if they run others.
    """

    seed: int
    name: str
    verdict: Verdict
    message: str = ""
    operations: int = 0
    repeated: int = 0
    whole: Figures | None = None
    folded: Figures | None = None
    identical: bool = False
    bits: bool | None = None

    @property
    def ratio(self) -> float:
        """The predicted seconds of the folded search's plan, in those of the other."""
        return self.folded.seconds / self.whole.seconds if self.folded and self.whole else 1.0


def compare(seed: int, runs: bool = True, make: Callable[[int], Repeated] = program) -> Compared:
    """Compare the plans of a seed's program, which is made by `make`, and with `runs` what they compute."""
    with default_dtype(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name = ""
        try:
            drawn = make(seed)
            name = drawn.name
            return _compared(drawn, runs)
        except Exception as error:
            return Compared(seed, name, Verdict.CRASH, _text(error))


def difference_of(seed: int) -> str:
    """The differences of the two plans of a seed's program, value by value.

    Raises:
        PlanError: one search refuses the program.
    """
    with default_dtype(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        request = _limited(program(seed))
        whole, folded = (Plan.of(plan(request, search)) for search in (WHOLE, FOLDED))
    return str(whole.diff(folded))


class _Requested(Exception):
    """Stands for the plan of a request, which is not made."""


def request_of(drawn: Repeated) -> Request:
    """Take what a program asks of the planner, without a plan."""

    def stop(request: Request, _: SearchOptions) -> NoReturn:
        raise _Requested(request)

    with mock.patch.object(stages, "plan", stop):
        try:
            drawn.jitted.plan(*drawn.args)
        except _Requested as stopped:
            return stopped.args[0]  # type: ignore[no-any-return]
    raise ValueError(f"The program of seed {drawn.seed} is planned without a search: {drawn.name}")


def _limited(drawn: Repeated) -> Request:
    """The request of a program, with its memory limit if it is small."""
    request = request_of(drawn)
    if drawn.memory is None or len(request.graph.operations) > _MOST_LIMITED:
        return request
    return attrs.evolve(request, memory_limit=int(drawn.memory * memory_of(plan(request, WHOLE)).peak))


def _compared(drawn: Repeated, runs: bool) -> Compared:
    request = _limited(drawn)
    name = drawn.name if request.memory_limit is None else f"{drawn.name}, memory {drawn.memory:.0%}"
    found = Compared(drawn.seed, name, Verdict.EQUAL, operations=len(request.graph.operations))
    tied = ties(request.graph)
    repeated = sum(not tied.keys().isdisjoint(operation.tensors) for operation in request.graph.operations)
    found = attrs.evolve(found, repeated=repeated)
    _planned(request, FOLDED)  # fills caches, before planning is timed
    planned = [_planned(request, search) for search in (WHOLE, FOLDED)]
    refused = [each for each in planned if isinstance(each, PlanError)]
    if refused:
        if len(refused) == len(planned):
            return attrs.evolve(found, verdict=Verdict.REFUSED, message=_first_line(refused[0]))
        which = "the search of every layer" if isinstance(planned[0], PlanError) else "the folded search"
        return attrs.evolve(found, verdict=Verdict.REFUSED_ONCE, message=f"{which}: {_first_line(refused[0])}")
    (whole, before), (folded, after) = (each for each in planned if not isinstance(each, PlanError))
    found = attrs.evolve(found, whole=before, folded=after, identical=str(whole) == str(folded))
    found = attrs.evolve(found, verdict=_speed(found.ratio))
    mistakes = [*_of_account("whole", whole), *_of_account("folded", folded)]
    if runs:
        more, bits = _run_both(drawn, whole, folded)
        mistakes += more
        found = attrs.evolve(found, bits=bits)
        if found.identical and bits is False:
            mistakes.append("the same plan computes other bits")
    return attrs.evolve(found, verdict=Verdict.WRONG, message="; ".join(mistakes)) if mistakes else found


def _planned(request: Request, search: SearchOptions) -> tuple[Plan, Figures] | PlanError:
    start = time.process_time()
    try:
        made = Plan.of(plan(request, search))
    except PlanError as error:
        return error
    seconds = time.process_time() - start
    sent = sum(comm.bytes for comm in made.comms)
    peak = memory_of(made).peak
    return made, Figures(made.seconds, made.timing.step, sent, len(made.comms), peak, made.gap, seconds)


def _speed(ratio: float) -> Verdict:
    if abs(ratio - 1) <= SAME:
        return Verdict.EQUAL
    return Verdict.WORSE if ratio > 1 else Verdict.BETTER


def _of_account(which: str, made: Plan) -> list[str]:
    """Compare what a plan states with what follows from it."""
    found = account(made)
    if abs(found.total - made.seconds) > _OF_SUMS * found.total:
        return [f"{which}: states {made.seconds} s, its account has {found.total} s"]
    limit, peak = made.request.memory_limit, memory_of(made).peak
    return [f"{which}: holds {peak} bytes, the limit is {limit}"] if limit is not None and peak > limit else []


def _run_both(drawn: Repeated, whole: Plan, folded: Plan) -> tuple[list[str], bool | None]:
    """Find mistakes in the results of two plans, and whether these have the same bits."""
    with OneDevice():
        expected = tree_leaves(drawn.expected())
    mistakes, results = [], []
    for which, made in (("whole", whole), ("folded", folded)):
        with record_traffic() as traffic:
            results.append(run(made, drawn.args))
        mistakes += [f"{which}: {text}" for text in comms_differences(made, traffic)]
        mistakes += [f"{which}: {text}" for text in _wrong(results[-1], expected, made.request)]
    sent = [[(comm.kind, comm.axes, comm.bytes) for comm in made.comms] for made in (whole, folded)]
    if sent[0] != sent[1]:
        return mistakes, None
    pairs = zip(*results, strict=True)
    return mistakes, all(torch.equal(one.full_tensor(), other.full_tensor()) for one, other in pairs)


def run(made: Plan, args: Sequence[Any]) -> list[DTensor]:
    """The results of a plan on virtual ranks, for arguments on one device."""
    request, local = made.request, lower(made)
    placed = [
        distribute(leaf, spec.pspec, made.mesh).shards
        for leaf, spec in zip(tree_leaves(args), request.input_specs, strict=True)
    ]
    return list(map(wrap, local.output_specs, VirtualProgram(local)(placed)))


def _wrong(results: Sequence[DTensor], expected: Sequence[torch.Tensor], request: Request) -> list[str]:
    mistakes = []
    for number, (result, truth, spec) in enumerate(zip(results, expected, request.output_specs, strict=True)):
        if reason := difference(result, truth, spec.pspec if spec else None):
            mistakes.append(f"result {number}: {reason}")
    return mistakes


def _first_line(error: PlanError) -> str:
    return str(error).partition(". Held there")[0].partition("\n")[0]


def _text(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} [{place.filename.rsplit('/', 2)[-1]}:{place.lineno}]"[:1500]
