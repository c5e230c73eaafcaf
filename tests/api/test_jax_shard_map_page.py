"""The page of JAX's tests of `shard_map` names tests that exist, and counts what it lists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "proofs" / "reports" / "shard_map_cases.md").read_text()
ROWS = re.findall(r"^\| `(test_\w+)` \| ([a-z ]+) \| (.+) \|$", PAGE, re.MULTILINE)
OURS = re.compile(r"`(\w+)`: `(test_\w+)`")


def functions_of(path: Path) -> dict[str, str]:
    """The test functions of a file, each with the text of its decorators."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: " ".join(map(ast.unparse, node.decorator_list)) for node in functions}


def test_each_method_is_listed_once() -> None:
    assert 274 == len(ROWS) == len({method for method, _, _ in ROWS})


def test_the_counts_are_those_of_the_list() -> None:
    counts = Counter(outcome for _, outcome, _ in ROWS)
    assert {"passes", "refused", "fails", "not applicable"} >= set(counts)
    stated = {name: int(count) for name, count in re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", PAGE, re.MULTILINE)}
    applicable = len(ROWS) - counts["not applicable"]
    assert {name: counts[name] for name in ("passes", "refused", "fails", "not applicable")} | {
        "applicable": applicable,
        "all": len(ROWS),
    } == stated
    assert f"## Refused: {counts['refused']} of {applicable} " in PAGE
    assert counts["refused"] * 10 <= applicable
    reasons = PAGE[PAGE.index("## Refused") : PAGE.index("## Fails")]
    assert counts["refused"] == sum(map(int, re.findall(r"\| (\d+) \|", reasons)))


def test_the_tests_that_are_named_exist() -> None:
    found = {
        path.stem.removeprefix("test_jax_shard_map_"): functions_of(path)
        for path in Path(__file__).parent.glob("test_jax_*")
    }
    for method, outcome, text in ROWS:
        ours = OURS.fullmatch(text)
        assert (outcome == "not applicable") == (ours is None), method
        if ours is not None:
            file, name = ours.groups()
            assert name in found[file], f"{method}: {file} has no {name}"
