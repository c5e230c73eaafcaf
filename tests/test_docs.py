"""The python blocks of docs/ run, and print the text blocks that follow them; links lead somewhere.

`python tests/test_docs.py` writes what they print now into the pages.
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_readme import BLOCK, run_blocks

import spmd

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TEXTS = [*PAGES, *REFERENCE, *NOTEBOOKS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]

FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:docs|notebooks|examples|benchmarks|proofs|spmd)/[\w./-]*)`")
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)", re.MULTILINE)


def relative(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.name)
def test_pages_print_what_they_say(page):
    text = page.read_text()
    if "import transformers" in text:
        pytest.importorskip("transformers")
    assert text == run_blocks(text)


@pytest.mark.slow
def test_the_file_of_the_first_page_prints_the_same_on_processes(tmp_path):
    pytest.importorskip("transformers")
    text = (DOCS / "get_started.md").read_text()
    block = next(match for match in BLOCK.finditer(text) if match["code"].startswith("# train.py\n"))
    command = "torchrun --nproc-per-node 4 train.py"
    assert f"```shell\nvenv/bin/{command}\n```" in text
    (tmp_path / "train.py").write_text(block["code"])
    run = [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert block["output"] == printed


def anchors(path):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def dead_links(path, text):
    """The links of a page, and the files of the repository that it names, that lead nowhere."""
    prose = FENCED.sub("", text)
    links = [link for link in LINK.findall(prose) if not re.match(r"https?:|mailto:", link)]
    named = [name for name in PATH.findall(prose) if not (ROOT / name).exists()]
    dead = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = (path.parent / name) if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead + named


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_links_lead_somewhere(path):
    assert [] == dead_links(path, path.read_text())


def test_dead_links_are_found():
    text = "# A b\n[x](calls.md) [y](calls.md#methods) [z](calls.md#none) [n](none.md) `docs/none.md` `docs/calls.md`"
    assert ["calls.md#none", "none.md", "docs/none.md"] == dead_links(DOCS / "page.md", text)


def navigation(page):
    """The pages that the toctrees of a page name, in order."""
    lines = "".join(TOCTREE.findall(page.read_text())).splitlines()
    names = [line for line in lines if line and not line.startswith(":")]
    found = []
    for name in names:
        target = page.parent / name
        files = [target.with_name(target.name + suffix) for suffix in (".md", ".ipynb")]
        assert any(file.exists() for file in files), f"{relative(page)} names {name}, which does not exist"
        found += [Path(os.path.normpath(file)) for file in files if file.exists()]
    return found


def test_every_page_is_in_the_navigation_once():
    listed = navigation(DOCS / "index.md") + navigation(DOCS / "reference/index.md")
    pages = {*PAGES, *REFERENCE, *NOTEBOOKS} - {DOCS / "index.md"}
    assert sorted(map(relative, pages)) == sorted(map(relative, listed))


def test_readme_lists_the_guides_in_the_order_of_the_site():
    text = (ROOT / "README.md").read_text()
    listed = [name for number, name in re.findall(r"^(\d+)\. \[.*?\]\(docs/(\w+)\.md\)", text, re.MULTILINE)]
    guides = next(block for block in TOCTREE.findall((DOCS / "index.md").read_text()) if ":caption: Guides" in block)
    assert re.findall(r"^\w+$", guides, re.MULTILINE) == listed


def documented():
    """What the reference has a directive for: kinds by names; an automodule stands for the names in its `__all__`."""
    return [(name, kind) for page in REFERENCE for kind, name in DIRECTIVE.findall(page.read_text())]


def test_every_public_name_is_in_the_reference_once():
    names = [name for name, _ in documented()]
    assert sorted(names) == sorted(set(names))
    assert [] == [name for name in spmd.__all__ if f"spmd.{name}" not in names]


def test_what_the_reference_names_has_a_docstring():
    for name, kind in documented():
        owner, _, attribute = name.rpartition(".")
        module = importlib.import_module(name if kind == "module" else owner)
        assert inspect.getdoc(module if kind == "module" else getattr(module, attribute)), name


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(run_blocks(page.read_text()))
