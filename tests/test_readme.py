"""The README's python blocks run, and print the text blocks that follow them.

`python tests/test_readme.py` (or `make readme`) writes what they print now into the README.
"""

import contextlib
import io
import linecache
import re
import textwrap
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
COLUMNS = 100
"""The width of code blocks: longer lines of what is printed go on in the next one, four columns to the right."""

BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```\n)?", re.DOTALL)


def run_blocks(text):
    """The README's text with outputs as printed now. Blocks share one namespace, as cells of a notebook do."""
    namespace = {"__name__": "readme"}

    def run(match):
        code = match["code"]
        if match["output"] is None:
            execute(code, namespace)
            return match[0]
        return f"```python\n{code}```\n\n```text\n{execute(code, namespace)}```\n"

    return BLOCK.sub(run, text)


def execute(code, namespace):
    """What a block prints. A first line `# name.py` names its file, which the programs' source lines quote."""
    named = re.match(r"# (\w+\.py)\n", code)
    name = named[1] if named else "example.py"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), namespace)
    return "".join(f"{wrapped(line.rstrip())}\n" for line in printed.getvalue().splitlines())


def wrapped(line):
    """A line of at most COLUMNS, or several: broken before comments and causes (`←`) first, then between words."""
    further = line[: len(line) - len(line.lstrip())] + "    "
    first, *rest = re.split(r"  (?=[#←] )", line)
    lines = [first]
    for part in rest:
        joined = f"{lines[-1]}  {part}"
        lines[-1:] = [joined] if len(joined) <= COLUMNS else [lines[-1], further + part]
    keep = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    return "\n".join(textwrap.fill(each, COLUMNS, subsequent_indent=further, **keep) for each in lines)


def test_readme_prints_what_it_says():
    text = README.read_text()
    assert text == run_blocks(text)


def test_pages_show_the_programs_of_a_layer_and_of_a_training_step():
    pages = README, README.parent / "docs/jit.md"
    outputs = "".join(match["output"] or "" for page in pages for match in BLOCK.finditer(page.read_text()))
    assert ["def layer(", "def train_step("] == re.findall(r"def \w+\(", outputs)


def test_other_text_is_found():
    stale = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    assert stale.replace("3", "2") == run_blocks(stale)


if __name__ == "__main__":
    README.write_text(run_blocks(README.read_text()))
