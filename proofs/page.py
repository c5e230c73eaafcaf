"""Sections of a page of `proofs/reports/`, each written by its own command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/').replace('<', '&lt;') for cell in row)} |"


def section(page: str, name: str) -> str:
    """The text of a section of a page; empty if the page has no section of this name."""
    _, found, rest = page.partition(_begin(name))
    return rest.partition(_end(name))[0] if found else ""


def write_section(file: Path, name: str, text: str) -> None:
    """Replace a section of a page, or append it; other sections do not change."""
    page = file.read_text() if file.exists() else ""
    before, found, rest = page.partition(_begin(name))
    after = rest.partition(_end(name))[2] if found else ""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{before}{_begin(name)}{text}{_end(name)}{after}")


def _begin(name: str) -> str:
    return f"<!-- section {name} -->\n"


def _end(name: str) -> str:
    return f"<!-- end of section {name} -->\n"
