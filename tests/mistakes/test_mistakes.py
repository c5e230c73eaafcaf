"""A hundred mistakes of new users: each ends in an error or a warning that names the line and the remedy.

`PYTHONPATH=tests python tests/mistakes/test_mistakes.py` writes docs/mistakes.md.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
from mistake import Mistake, Seen, see, see_all
from workers import Workers, call_on_mesh

from proofs.page import table

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
    assert (PAGE.read_text()) == page(together[1])


def page(of_processes: list[Seen]) -> str:
    """docs/mistakes.md."""
    return "\n".join([*_HEAD, *_sections(of_processes)]) + "\n"


def _sections(of_processes: list[Seen]) -> Iterator[str]:
    for name, title in CATEGORIES.items():
        mistakes = MODULES[name].MISTAKES
        seen = of_processes if name == "processes" else [see(mistake) for mistake in mistakes]
        yield from ("", f"## {title}", "")
        rows = ((mistake.title, each.text) for mistake, each in zip(mistakes, seen, strict=True))
        yield from table(("mistake", "what it says"), rows)


PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
_HEAD = """# A hundred mistakes

What new users write, and what they are told: an error or a warning, at their line, with what to do. Tracebacks end at
that line; `step.py:12` stands for it where the message names it too. The cases are in `tests/mistakes/`, and this page
is made by `PYTHONPATH=tests python tests/mistakes/test_mistakes.py`.""".splitlines()

if __name__ == "__main__":
    with Workers(multiprocessing.get_context("spawn")) as started:
        mistakes = MODULES["processes"].MISTAKES
        answers = started.run(call_on_mesh, see_all, {"data": 2}, "distributed", mistakes, ranks=2)
    PAGE.write_text(page(answers[1]))
