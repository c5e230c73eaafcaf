"""What a training run shows in a terminal."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from typing import Any

import optree
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import spmd

FILE_WIDTH = 120
"""Columns of output that goes to no terminal."""

WIDEST_GRID = 8
"""Ranks side by side in a drawn mesh, at most."""

SHOWN = 0.99
"""What part of a step's bytes the table of collectives breaks down by cause."""


def make_console() -> Console:
    """A console as wide as the terminal, and wide enough for the tables where there is none; rank 0 speaks for all."""
    console = Console(quiet=spmd.process_index() > 0)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


def size(count: float) -> str:
    """Bytes for people, in powers of ten as collectives are counted.

    >>> size(6_514_000)
    '6.51 MB'
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def mesh_table(mesh: spmd.Mesh, strategy: str) -> Table:
    """The ranks of a small mesh of one or two axes, as a grid; of others, the axes."""
    table = Table(title=f"{mesh}: strategy {strategy}", title_justify="left")
    if len(mesh.names) > 2 or mesh.sizes[-1] > WIDEST_GRID:
        table.add_column("axis")
        table.add_column("size", justify="right")
        for name, count in mesh.axes.items():
            table.add_row(name, str(count))
        return table
    columns = mesh.sizes[-1]
    if len(mesh.names) == 2:
        table.add_column(" ↓ ".join(mesh.names) + " →")
    for column in range(columns):
        table.add_column(f"{mesh.names[-1]} {column}", justify="right")
    for row in range(mesh.size // columns):
        head = [f"{mesh.names[0]} {row}"] * (len(mesh.names) - 1)
        table.add_row(*head, *(f"rank {rank}" for rank in range(row * columns, (row + 1) * columns)))
    return table


def params_table(params: Any) -> Table:
    """How the parameters lie; blocks are alike, so one stands for all."""
    blocks, are_stacked = params["blocks"], isinstance(params["blocks"], dict)
    title = f"Parameters (blocks.* stands for {'all' if are_stacked else f'each of {len(blocks)}'} blocks)"
    table = Table(title=title, title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("global", justify="right")
    table.add_column("spec")
    table.add_column("local", justify="right")
    table.add_column("bytes a rank", justify="right")
    paths, leaves, _ = optree.tree_flatten_with_path({**params, "blocks": {"*": blocks if are_stacked else blocks[0]}})
    for path, leaf in zip(paths, leaves, strict=True):
        spec = leaf.spec
        local = spec.local_shape((0,) * len(spec.mesh.names))
        name = ".".join(map(str, path))
        table.add_row(name, str(list(leaf.shape)), repr(spec.pspec), str(list(local)), size(spec.local_bytes()))
    everything = optree.tree_leaves(params)
    whole = sum(leaf.spec.meta.nbytes for leaf in everything)
    table.add_section()
    table.add_row("all", size(whole), "", "", size(sum(leaf.spec.local_bytes() for leaf in everything)))
    return table


def comms_table(plan: Any) -> Table:
    """The collectives of a step, by kind, axes and cause; blocks are alike, and small ones are one row."""
    counts: Counter[tuple[str, str, str]] = Counter()
    totals: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for comm in plan.comms:
        key = (comm.kind, ", ".join(comm.axes), re.sub(r"_blocks_\d+_", "_blocks_*_", comm.cause))
        counts[key] += 1
        totals[key] += comm.bytes
    table = Table(title="Collectives of one step (bytes sent by a rank, ring model)", title_justify="left")
    for name in ("kind", "axes", "count", "bytes", "cause"):
        table.add_column(name, justify="right" if name in ("count", "bytes") else "left")
    rest, everything = sum(totals.values()), sum(totals.values())
    by_size = sorted(totals, key=lambda key: (-totals[key], key))
    for position, key in enumerate(by_size):
        if rest <= (1 - SHOWN) * everything and len(by_size) - position > 1:
            smaller = by_size[position:]
            row = ("smaller", "", sum(counts[other] for other in smaller), size(rest), f"{len(smaller)} other causes")
            table.add_row(*map(str, row))
            break
        kind, axes, cause = key
        table.add_row(kind, axes, str(counts[key]), size(totals[key]), cause)
        rest -= totals[key]
    table.add_section()
    table.add_row("all", "", str(sum(counts.values())), size(everything), "")
    return table


def losses_table(pairs: list[tuple[float, float]]) -> Table:
    """Losses on the mesh and on one device, side by side; at most twelve of them."""
    table = Table(title="Losses of the same steps", title_justify="left")
    for name in ("step", "mesh", "one device", "difference"):
        table.add_column(name, justify="right")
    stride = max(1, len(pairs) // 12)
    for step in range(0, len(pairs), stride):
        mesh, single = pairs[step]
        table.add_row(str(step), f"{mesh:.6f}", f"{single:.6f}", f"{mesh - single:+.1e}")
    return table


def printable(text: str) -> str:
    """Text that a terminal shows as it is: what an untrained model writes may hold control characters.

    >>> printable("a\\tb\\x1b[2J\\n")
    'a\\tb�[2J\\n'
    """
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


def progress(console: Console) -> Progress:
    """A bar with the loss and tokens per second."""
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
