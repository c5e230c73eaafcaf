"""A hundred mistakes of new users: each ends in an error or a warning that names the line and the remedy.

`PYTHONPATH=tests python tests/mistakes/test_mistakes.py` writes the table of docs/debugging.md.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
from mistake import Mistake, Seen, see, see_all
from workers import Workers, call_on_mesh

from proofs.page import section, table, write_section

CATEGORIES = {
    "specs": "Specs",
    "trees": "Trees",
    "meshes": "Meshes",
    "devices": "Devices, dtypes and shapes",
    "side_effects": "Side effects",
    "control_flow": "Control flow",
    "transforms": "Transforms",
    "values": "Values outside of jit",
    "files": "Checkpoints and files",
    "processes": "Processes",
}
MODULES = {name: importlib.import_module(f"mistakes_{name}") for name in CATEGORIES}
ALONE = [(name, mistake) for name, module in MODULES.items() if name != "processes" for mistake in module.MISTAKES]


@pytest.mark.parametrize(("category", "mistake"), ALONE, ids=[mistake.function.__name__ for _, mistake in ALONE])
def test_the_message_names_line_and_remedy(category: str, mistake: Mistake) -> None:
    assert [] == see(mistake).problems(mistake)


@pytest.fixture(scope="module")
def together(workers: Workers) -> list[list[Seen]]:
    """What the mistakes of processes show on each of two ranks, which make one after the other."""
    mistakes = MODULES["processes"].MISTAKES
    return workers.run(call_on_mesh, see_all, {"data": 2}, "distributed", mistakes, ranks=2)


def test_processes_get_the_message_on_every_rank(together: list[list[Seen]]) -> None:
    for mistake, *seen in zip(MODULES["processes"].MISTAKES, *together, strict=True):
        alone = mistake.function.__name__ == "outside_of_mesh"  # it is right on the rank that the mesh has
        assert [] == [problem for each in seen[alone:] for problem in each.problems(mistake)]


def test_there_are_ten_of_each_category() -> None:
    assert dict.fromkeys(CATEGORIES, 10) == {name: len(module.MISTAKES) for name, module in MODULES.items()}
    functions = [mistake.function.__name__ for module in MODULES.values() for mistake in module.MISTAKES]
    assert 100 == len(set(functions))


def test_the_page_shows_them(together: list[list[Seen]]) -> None:
    assert section(PAGE.read_text(), "mistakes") == table_of_mistakes(together[1])


def table_of_mistakes(of_processes: list[Seen]) -> str:
    """The table of docs/debugging.md; what torch raises is without the note that says how to look into it."""
    return "\n".join(table(("where", "mistake", "what it says"), _rows(of_processes))) + "\n"


def _rows(of_processes: list[Seen]) -> Iterator[tuple[str, str, str]]:
    for name, title in CATEGORIES.items():
        mistakes = MODULES[name].MISTAKES
        seen = of_processes if name == "processes" else [see(mistake) for mistake in mistakes]
        for mistake, each in zip(mistakes, seen, strict=True):
            yield title, mistake.title, each.text.partition(" torch raised this at ")[0]


PAGE = Path(__file__).parents[2] / "docs" / "debugging.md"

if __name__ == "__main__":
    with Workers(multiprocessing.get_context("spawn")) as started:
        mistakes = MODULES["processes"].MISTAKES
        answers = started.run(call_on_mesh, see_all, {"data": 2}, "distributed", mistakes, ranks=2)
    write_section(PAGE, "mistakes", table_of_mistakes(answers[1]))
