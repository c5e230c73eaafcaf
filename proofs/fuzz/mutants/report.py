"""The table of mutants: on the console, and as a section of the page `proofs/reports/fuzz.md`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from proofs.fuzz.mutants import FAMILIES
from proofs.fuzz.mutants.mutant import Mutant
from proofs.fuzz.mutants.search import Finding
from proofs.page import table

_HEAD = ("mutant", "what is broken", "programs", "seed", "how")

_ELSEWHERE = (
    (
        "transposes of the collective primitives",
        "a function under `spmd.jit` calls no primitive, so no program differentiates one",
        "`tests/collectives/test_collectives.py`: values, gradient, second order, vmap and adjoint identity of each",
    ),
    (
        "padding of uneven pieces, their order in buffers, and its removal",
        "virtual ranks exchange no buffers: only processes do",
        "`tests/collectives/test_transport_dtypes.py`, `tests/collectives/test_distributed.py`",
    ),
    (
        "the copy to channels-last memory that canonicalization keeps",
        "it changes no value: strides are no part of a program",
        "`tests/lowering/test_memory_layouts.py`",
    ),
    (
        "the order of axes in a step over several, uneven permutations, axes of one rank",
        "plans move values along one axis at a time, but where specs nest axes in another order than the plan",
        "`tests/collectives/test_resharding.py`: every pair of specs, on even and uneven lengths",
    ),
    (
        "how `constrain` and `reshard` are batched",
        "it changes no value, only where it is",
        "`tests/tracing/test_trace.py`",
    ),
    (
        "copies before other kernels that read strides",
        "hardly a program has such an operand in the memory that its kernel mistakes",
        "`python -m proofs.rule_check --layouts`: each operator on operands in other memory, with and without the copy",
    ),
    (
        "a view of a shard that stays a view",
        "it changes no value: before a view, as before any kernel that needs contiguous memory, lowering puts a copy",
        "`tests/lowering/test_memory_layouts.py`",
    ),
    (
        "rules of factories, such as `arange`",
        "no plan has them: what depends on no input is computed whole, and then sharded",
        "`python -m proofs.rule_check`",
    ),
    (
        "equal primitives that ranks of different shapes share",
        "a plan would have to move a value and a view of it alike, and not the view's operand",
        "`tests/lowering/test_lower.py`: such a plan, written by hand",
    ),
    (
        "a primitive that one rank has no use for, and drops",
        "no rank has one: local implementations make each result from all operands",
        "none: a rule of one's own whose local implementation does not would show it",
    ),
    (
        "dead code, identities and reshapes that stay",
        "they change no value, only the time that a program takes",
        "`tests/tracing/test_canonicalize.py`, `tests/lowering/test_lower.py`",
    ),
)


def show(found: Mapping[str, Finding], console: Console) -> None:
    """Print the tables."""
    for title, mutants in FAMILIES.items():
        rows = list(_rows(mutants, found))
        if rows:
            shown = Table(*_HEAD, title=title)
            for row in rows:
                shown.add_row(*(cell.replace("[", "\\[") for cell in row))
            console.print(shown)
    console.print(summary(found))


def summary(found: Mapping[str, Finding]) -> str:
    """The figures in one sentence."""
    counts = [finding.programs for finding in found.values() if finding.programs]
    if not counts:
        return f"{len(found)} mutants, none found."
    return (
        f"{len(found)} mutants searched for, {len(counts)} found, after {statistics.median(counts):,.0f} programs in "
        f"the median and {max(counts):,} at most."
    )


def page(found: Mapping[str, Finding], seeds: range) -> str:
    """The section of `proofs/reports/fuzz.md`."""
    return "\n".join(_lines(found, seeds)) + "\n"


def _lines(found: Mapping[str, Finding], seeds: range) -> Iterator[str]:
    yield "## Mutants\n"
    yield f"Programs {seeds.start}:{seeds.stop}. {summary(found)} This section is written by\n"
    yield f"    python -m proofs.fuzz.mutants --seeds {seeds.start}:{seeds.stop} --markdown proofs/reports/fuzz.md\n"
    yield "*Programs* counts the fuzz's programs from the first one to the one that finds the mutant; *none of n*: so"
    yield "many programs that may show it ran.\n"
    for title, mutants in FAMILIES.items():
        rows = list(_rows(mutants, found))
        if rows:
            yield f"### {title}\n"
            yield from table(_HEAD, rows)
            yield ""
    yield "### Left to other tests\n"
    yield from table(("what", "why no program shows it", "tests"), _ELSEWHERE)


def _rows(mutants: Iterable[Mutant], found: Mapping[str, Finding]) -> Iterator[Sequence[str]]:
    for mutant in mutants:
        finding = found.get(mutant.name)
        if finding is None:
            continue
        if finding.outcome is None:
            yield mutant.name, mutant.breaks, f"none of {finding.concerned}", "", "not found"
        else:
            outcome = finding.outcome
            yield mutant.name, mutant.breaks, str(finding.programs), str(outcome.seed), outcome.status.value
