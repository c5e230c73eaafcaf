"""The python blocks of pages run, and print the text blocks that follow them; links lead somewhere and have titles.

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
from test_readme import BLOCK, COLUMNS, run_blocks

import spmd

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
REFERENCE = DOCS / "reference.md"
REPORTS = sorted((ROOT / "proofs/reports").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TEXTS = [*PAGES, *REPORTS, *NOTEBOOKS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]

FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
TITLED = re.compile(r"\[((?:`[^`]*`|[^\[\]`])*)\]\([^)\s]+\)")
PATH = re.compile(r"`((?:docs|notebooks|examples|benchmarks|proofs|spmd)/[\w./-]*)`")
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)", re.MULTILINE)
ENTRIES = re.compile(r"^(\| (?:name|parameter) \| what it is \|\n\|---\|---\|\n)(?:\|.*\n)*", re.MULTILINE)
MOST_PAGES, MOST_LINES, MOST_WORDS = 22, 4800, 2200
"""A guide is read in ten minutes: its words, without code and tables."""


def relative(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in [*PAGES, *REPORTS] if BLOCK.search(page.read_text())], ids=relative)
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
    text = "# A b\n[x](jit.md) [y](jit.md#modules) [z](jit.md#none) [n](none.md) `docs/none.md` `docs/jit.md`"
    assert ["jit.md#none", "none.md", "docs/none.md"] == dead_links(DOCS / "page.md", text)


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
    listed = navigation(DOCS / "index.md")
    pages = {*PAGES, *NOTEBOOKS} - {DOCS / "index.md"}
    assert sorted(map(relative, pages)) == sorted(map(relative, listed))


def test_pages_are_few_and_short():
    lines = {relative(page): len(page.read_text().splitlines()) for page in PAGES}
    assert MOST_PAGES >= len(lines)
    assert MOST_LINES >= sum(lines.values()), lines


def prose(page):
    return "\n".join(line for line in FENCED.sub("", page.read_text()).splitlines() if not line.startswith("|"))


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_a_guide_is_read_in_ten_minutes(page):
    assert MOST_WORDS >= len(prose(page).split())


@pytest.mark.parametrize("page", [*(page for page in PAGES if page != REFERENCE), ROOT / "README.md"], ids=relative)
def test_code_has_lines_of_at_most_a_hundred_columns(page):
    wide = [line for block in FENCED.findall(page.read_text()) for line in block.splitlines() if len(line) > COLUMNS]
    assert [] == wide


def file_names(text):
    """The titles of links that are names of files, and pages that are named by their files."""
    prose = FENCED.sub("", text)
    titles = [title for title in TITLED.findall(prose) if re.search(r"\.(md|ipynb)\b|^\W*\w+/[\w/]+\W*$", title)]
    return titles + re.findall(r"`((?:docs|notebooks)/[\w./-]+\.(?:md|ipynb))`", prose)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=relative)
def test_links_have_titles(page):
    assert [] == file_names(page.read_text())


def test_file_names_as_titles_are_found():
    text = "[`a.md`](a.md) [a.md](a.md) [docs/a](a.md) [A guide](a.md) [`jit`](jit.md) see `docs/a.md`"
    assert ["`a.md`", "a.md", "docs/a", "docs/a.md"] == file_names(text)


def documented():
    """What the reference has a directive for: kinds by names; an automodule stands for the names in its `__all__`."""
    return [(name, kind) for kind, name in DIRECTIVE.findall(REFERENCE.read_text())]


def test_every_public_name_is_in_the_reference_once():
    names = [name for name, _ in documented()]
    assert sorted(names) == sorted(set(names))
    assert [] == [name for name in spmd.__all__ if f"spmd.{name}" not in names]


def found(name):
    owner, _, attribute = name.rpartition(".")
    return importlib.import_module(name) if name in sys.modules else getattr(importlib.import_module(owner), attribute)


def test_what_the_reference_names_has_a_docstring():
    assert [] == [name for name, _ in documented() if not inspect.getdoc(found(name))]


def test_the_reference_has_a_line_for_each_name():
    assert REFERENCE.read_text() == with_entries(REFERENCE.read_text())


def test_the_reference_spells_out_jit():
    (signature,) = re.findall(r"autofunction:: spmd.jit\((.*)\)", REFERENCE.read_text())
    (entries,) = (each[0] for each in ENTRIES.finditer(REFERENCE.read_text()) if each[0].startswith("| parameter"))
    for name in list(inspect.signature(spmd.jit).parameters)[1:]:
        assert re.search(rf"\b{name}=", signature)
        assert re.search(rf"`{name}`", entries)


CONSTANTS = {
    "spmd.FREE": "As `out_specs`: every result is laid out as the planner finds cheapest.",
    "spmd.rules.Body": "A local implementation of a row, written with collectives.",
    "spmd.rules.RULES": "The rules of torch's operators, an immutable mapping.",
}


def with_entries(text):
    """The reference with a line for each name that a section has a directive for, and for each parameter of `jit`."""

    def entries(match):
        if match[1].startswith("| parameter"):
            return match[1] + "".join(f"| `{name}` | {cell(what)} |\n" for name, what in parameters(spmd.jit))
        block = text[match.end() : text.index("```\n", text.index("```{eval-rst}", match.end()))]
        names = [each for kind, name in DIRECTIVE.findall(block) for each in members(name, kind)]
        return match[1] + "".join(f"| `{name}` | {cell(CONSTANTS.get(name) or summary(name))} |\n" for name in names)

    return ENTRIES.sub(entries, text)


def cell(text):
    return text.replace("|", "\\|")


def members(name, kind):
    """A name, or the public names of a module."""
    if kind != "module":
        return [name]
    module = importlib.import_module(name)
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == name and key[0] != "_"]
    return [f"{name}.{each}" for each in getattr(module, "__all__", own) if each != "TYPE_CHECKING"]


def summary(name):
    return sentence(inspect.getdoc(found(name)) or "")


def sentence(text):
    return re.split(r"(?<=[\w)`\]]\.) ", " ".join(text.partition("\n\n")[0].split()))[0]


def parameters(function):
    """The parameters that a docstring describes, each with its first sentence."""
    block = inspect.getdoc(function).partition("Args:\n")[2].partition("\n\n")[0]
    for each in re.split(r"\n(?=    \w)", block):
        names, _, what = each.strip().partition(": ")
        for name in names.split(", "):
            yield name, sentence(what)


if __name__ == "__main__":
    for page in [*PAGES, *REPORTS]:
        page.write_text(with_entries(run_blocks(page.read_text())))
