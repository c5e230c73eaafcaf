"""How `make docs` builds the site: Sphinx over the pages of docs/ and notebooks/, offline, warnings are errors."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

import spmd

project, author, copyright = "spmd", "the authors of spmd", "the authors of spmd, Apache-2.0"
version = release = spmd.__version__
root_doc = "docs/index"
include_patterns = ["docs/**.md", "notebooks/*.ipynb", "proofs/reports/*.md"]
exclude_patterns = [
    ".*",
    "benchmarks",
    "build",
    "dist",
    "examples",
    "proofs/[!r]*",
    "proofs/re[!p]*",
    "proofs/ru*",
    "spmd",
    "tests",
]  # not searched

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"  # tqdm asks for widgets when transformers is imported

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
napoleon_custom_sections = [("Fields", "params_style")]
napoleon_numpy_docstring = False
toc_object_entries_show_parents = "hide"

suppress_warnings = ["toc.not_included"]  # reports, which docs/checked.md links

html_theme = "furo"
html_title = f"spmd {release}"
html_css_files = ["wide.css"]
html_static_path = ["_static"]
html_extra_path = ["_site"]  # a first page that leads to docs/index.html
html_copy_source = html_show_sourcelink = False


def link_pages(app: Sphinx, doctree: nodes.document) -> None:
    """Turn the path of a page in running text, `docs/planning.md`, into a link with the title of the page.

    A public name, `spmd.distribute`, becomes a link to the reference.
    """
    for literal in list(doctree.findall(nodes.literal)):
        text = literal.astext()
        docname, _, suffix = text.rpartition(".")
        if isinstance(literal.parent, (nodes.reference, pending_xref)):
            continue
        if suffix in ("md", "ipynb") and docname in app.env.found_docs:
            page = {
                "refdomain": "std",
                "reftype": "doc",
                "reftarget": f"/{docname}",
                "refexplicit": False,
            }
            literal.replace_self(
                pending_xref(
                    "", nodes.inline("", text), refdoc=app.env.docname, refwarn=True, **page
                )
            )
        elif re.fullmatch(r"spmd(\.\w+)+", text):
            name = {"refdomain": "py", "reftype": "obj", "reftarget": text, "refexplicit": True}
            literal.replace_self(
                pending_xref("", literal.deepcopy(), refdoc=app.env.docname, **name)
            )


def markdown_to_rst(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Turn the little Markdown that docstrings have into reStructuredText: `code`, with links to names, and blocks."""
    text = re.sub(r"`([^`]+)`(?=(\w?))", _code, "\n".join(lines))
    text = re.sub(r"(?m)^( *)(.*[^:\n]):\n\n(?=\1 +)", r"\1\2::\n\n", text)
    lines[:] = text.split("\n")


def _code(match: re.Match[str]) -> str:
    code = (
        f":py:obj:`{match[1]}`" if re.fullmatch(r"[A-Za-z_][\w.]*", match[1]) else f"``{match[1]}``"
    )
    return code + "\\ " * bool(match[2])


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect(
        "autodoc-process-docstring", markdown_to_rst, priority=400
    )  # before napoleon reads the sections
    app.connect("doctree-read", link_pages)
