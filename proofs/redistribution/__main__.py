"""Every redistribution between two specs of a mesh: values, gradients, and its cost beside an optimum and torch's.

    python -m proofs.redistribution                       # meshes (4), (2, 2) and (2, 2, 2): twenty minutes
    python -m proofs.redistribution --meshes 4 2x2        # seconds
    python -m proofs.redistribution --every 15            # from every fifteenth spec to all

The exit status is 1 if a value or a gradient is wrong, or torch takes less time, or is better in bytes or collectives
and not worse in the other.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import shlex
import sys
import warnings
from pathlib import Path

import torch

from proofs.page import table, write_section
from proofs.pool import Lost, each
from proofs.redistribution.optimum import Cost
from proofs.redistribution.sweep import Found, compare, wrong
from spmd.core.mesh import Mesh, make_mesh
from spmd.core.spec import TensorMeta

SHAPES = ((16, 8), (4096, 1024))
"""A tensor whose collectives take the time of their launch, and one for which bytes count; even on all meshes."""

UNEVEN = (5, 3)
"""The tensor of the comparison of values and gradients: some shards are uneven, others empty."""

TRADED = ("mesh", "tensor", "pairs", "such as", "bytes, collectives, cost: ours", "torch's")

SECONDS = 6 * 3600.0
"""After which a mesh and a tensor are given up."""

HEAD = (
    "mesh", "tensor", "pairs", "above the optimum: targets complete, partial", "in a program",
    "torch has", "bytes: ours, torch's", "fewer, as many, more", "collectives: ours, torch's", "fewer, as many, more",
    "torch takes less time", "torch is better in one and not worse in the other",
)  # fmt: skip


def main() -> int:
    """Compare and print; 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs.redistribution",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--meshes", nargs="+", default=["4", "2x2", "2x2x2"], help="their sizes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this page")
    parser.add_argument("--every", type=int, default=1, help="of the sources, only every so many-th")
    parser.add_argument("--jobs", type=int, default=2, help="processes, which share meshes and tensors")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)  # torch warns of every sequence that it cannot join
    tasks = [(sizes, shape) for sizes in options.meshes for shape in (UNEVEN, *SHAPES)]
    done = dict(each(tasks, functools.partial(_run, every=options.every), jobs=options.jobs, seconds=SECONDS))
    rows, errors, traded = [], [], []
    for sizes, shape in tasks:
        mesh, found = _mesh(sizes), done[sizes, shape]
        if isinstance(found, Found):
            rows.append(_row(mesh, shape, found))
            traded += [
                [str(mesh.sizes), str(list(shape)), str(count), f"`{pair}`", _cost(ours), _cost(theirs)]
                for (pair, ours, theirs), count in sorted(found.traded.items(), key=lambda item: (-item[1], item[0]))
            ]
            if found.dominated or found.against["price", 1]:
                errors.append(f"costs on {mesh} of {shape}")
        else:
            errors += [f"{found} on {mesh}"] if isinstance(found, Lost) else found
    about = f"All {sum(int(row[2]) for row in traded)} pairs that torch does with less of one and more of the other:"
    text = "\n".join([*table(HEAD, rows), "", about, "", *table(TRADED, traded), ""])
    print(text, f"wrong: {errors or 'nothing'}", sep="\n")
    if options.markdown:
        command = f"    python -m proofs.redistribution {shlex.join(sys.argv[1:])}"
        about = f"Written by\n\n{command}\n\ntorch {torch.__version__}; wrong values or gradients: {len(errors)}.\n\n"
        write_section(options.markdown, f"redistribution {' '.join(options.meshes)}", about + text)
    return int(bool(errors))


def _run(task: tuple[str, tuple[int, ...]], every: int) -> Found | list[str]:
    """What is wrong with the values of an uneven tensor, or the costs of an even one."""
    sizes, shape = task
    mesh, meta = _mesh(sizes), TensorMeta(shape, torch.float32)
    return list(wrong(mesh, meta, every)) if shape == UNEVEN else compare(mesh, meta, every)


def _mesh(sizes: str) -> Mesh:
    axes = dict(zip("xyzw", map(int, sizes.split("x")), strict=False))
    assert math.prod(axes.values()) > 1
    return make_mesh(axes, runtime="virtual")


def _cost(cost: Cost) -> str:
    return f"{cost.bytes:,.0f}, {cost.count}, {cost.price:,.0f}"


def _row(mesh: Mesh, shape: tuple[int, ...], found: Found) -> list[str]:
    def split(name: str) -> str:
        return ", ".join(f"{found.against[name, sign]:,}" for sign in (-1, 0, 1))

    return [
        str(mesh.sizes),
        str(list(shape)),
        f"{found.pairs:,}",
        f"{found.above['complete']}, {found.above['partial']:,} (up to {found.excess:.2f} times)",
        f"{found.above['program']:,}",
        f"{found.pairs - found.refused:,}",
        f"{found.ours['bytes']:,.0f}, {found.theirs['bytes']:,.0f}",
        split("bytes"),
        f"{found.ours['count']:,}, {found.theirs['count']:,}",
        split("count"),
        f"{found.against['price', 1]}",
        f"{found.dominated}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
