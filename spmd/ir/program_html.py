"""Programs as HTML, for notebooks: comments stand back, and lines that communicate stand out."""

from __future__ import annotations

from html import escape

_BOX = "max-height: 40em; overflow: auto; white-space: pre; font-size: 12px; line-height: 1.5; margin: 0.3em 0"


def program_html(title: str, text: str) -> str:
    """A program as HTML that a notebook shows.

    Args:
        title: what it is, in one line.
        text: the program; what follows `  # ` in a line is a comment, and an arrow in it marks a collective.
    """
    lines = "\n".join(map(_line, text.splitlines()))
    return f'<div><b>{escape(title)}</b>\n<pre style="{_BOX}">{lines}</pre></div>'


def _line(line: str) -> str:
    code, mark, comment = line.partition("  # ")
    shown = escape(code) + (f'<span style="opacity: 0.7">{escape(mark + comment)}</span>' if mark else "")
    return f'<span style="background: #f5851840">{shown}</span>' if "←" in comment else shown
