"""The pages of JAX's tests name tests of ours that exist, and count what they list."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

REPORTS = Path(__file__).parents[2] / "proofs" / "reports"
METHODS = {"shard_map": 274, "control_flow": 161}
"""By the subject of a page, how many methods JAX tests it with."""
OURS = re.compile(r"`(\w+)`: `(test_\w+)`")

subjects = pytest.mark.parametrize("subject", METHODS)


def page_of(subject: str) -> str:
    return (REPORTS / f"{subject}_cases.md").read_text()


def rows_of(subject: str) -> list[tuple[str, str, str]]:
    """Each method, with its outcome and the test of ours, or why there is none."""
    return re.findall(r"^\| `(test\w+)` \| ([a-z ]+) \| (.+) \|$", page_of(subject), re.MULTILINE)


def functions_of(path: Path) -> dict[str, str]:
    """The test functions of a file, each with the text of its decorators."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: " ".join(map(ast.unparse, node.decorator_list)) for node in functions}


@subjects
def test_each_method_is_listed_once(subject: str) -> None:
    rows = rows_of(subject)
    assert METHODS[subject] == len(rows) == len({method for method, _, _ in rows})


@subjects
def test_the_counts_are_those_of_the_list(subject: str) -> None:
    page, rows = page_of(subject), rows_of(subject)
    counts = Counter(outcome for _, outcome, _ in rows)
    assert {"passes", "refused", "fails", "not applicable"} >= set(counts)
    listed = page[: page.index("## Refused")]
    stated = {name: int(count) for name, count in re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", listed, re.MULTILINE)}
    applicable = len(rows) - counts["not applicable"]
    assert {name: counts[name] for name in ("passes", "refused", "fails", "not applicable")} | {
        "applicable": applicable,
        "all": len(rows),
    } == stated
    assert f"## Refused: {counts['refused']} of {applicable} " in page
    assert f"## Fails: {counts['fails']} of {applicable}" in page
    assert counts["refused"] * 10 <= applicable
    reasons = page[page.index("## Refused") : page.index("## Fails")]
    assert counts["refused"] == sum(map(int, re.findall(r"\| (\d+) \|", reasons)))


@subjects
def test_the_tests_that_are_named_exist(subject: str) -> None:
    prefix = f"test_jax_{subject}_"
    found = {path.stem.removeprefix(prefix): functions_of(path) for path in Path(__file__).parent.glob(f"{prefix}*.py")}
    for method, outcome, text in rows_of(subject):
        ours = OURS.fullmatch(text)
        assert (outcome == "not applicable") == (ours is None), method
        if ours is not None:
            file, name = ours.groups()
            assert name in found[file], f"{method}: {file} has no {name}"
