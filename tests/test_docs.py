"""The python blocks of docs/ run, and print the text blocks that follow them.

`python tests/test_docs.py` writes what they print now into the pages.
"""

from pathlib import Path

import pytest
from test_readme import BLOCK, run_blocks

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.name)
def test_pages_print_what_they_say(page):
    text = page.read_text()
    assert text == run_blocks(text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(run_blocks(page.read_text()))
