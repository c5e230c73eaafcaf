"""What an operator on DTensors costs outside of jit, beside torch's DTensor: one process, one rank, so nothing is sent.

Each signature (operator, specs, shape) is timed in turns: ours, torch's DTensor, and the operator on the plain shard.

    python benchmarks/eager_overhead.py
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import statistics
import timeit
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import spmd
from spmd import P
from spmd.api.eager import operator_cache
from turns import Case

SHAPES = ((8, 8), (64, 64))
SPECS: dict[str, dict[str, P]] = {
    "1-D": {"replicated": P(), "dim 0": P("x"), "dim 1": P(None, "x")},
    "2-D": {"dims 0 and 1": P("x", "y"), "dim 0": P("y")},
}
SIZES = {"1-D": {"x": 1}, "2-D": {"x": 1, "y": 1}}

Operator: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Any]

OPERATORS: dict[str, Operator] = {
    "add": lambda x, y: x + y,
    "add a number": lambda x, y: x + 1,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x, y: -x,
    "relu": lambda x, y: torch.relu(x),
    "gelu": lambda x, y: F.gelu(x),
    "mm": lambda x, y: x @ y,
    "sum": lambda x, y: x.sum(),
    "sum of a dim": lambda x, y: x.sum(0),
    "mean": lambda x, y: x.mean(1),
    "softmax": lambda x, y: x.softmax(-1),
    "transpose": lambda x, y: x.t(),
    "unsqueeze": lambda x, y: x.unsqueeze(0),
    "select": lambda x, y: x[0],
    "clone": lambda x, y: x.clone(),
    "cast": lambda x, y: x.double(),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "stack": lambda x, y: torch.stack([x, y]),
    "layer_norm": lambda x, y: F.layer_norm(x, x.shape[-1:]),
}


@attrs.frozen
class Times:
    """Microseconds of one call: ours, torch's DTensor (None where it fails), and of the plain shard."""

    name: str
    mesh: str
    requires_grad: bool
    ours: float
    torchs: float | None
    plain: float


def microseconds(functions: Sequence[Callable[[], object]]) -> list[float]:
    """The time of a call of each function, timed in turns: the best of several rounds."""
    timers = [timeit.Timer(function) for function in functions]
    counts = [max(5, int(2e-3 / max(timer.timeit(3) / 3, 1e-7))) for timer in timers]
    rounds = [[timer.timeit(count) / count for timer, count in zip(timers, counts, strict=True)] for _ in range(5)]
    return [min(times) * 1e6 for times in zip(*rounds, strict=True)]


@attrs.frozen
class Signature:
    """An operator, a mesh, a spec by the sizes of the mesh's axes, and the operands' shape."""

    name: str
    mesh: str
    spec: P
    shape: tuple[int, ...]
    requires_grad: bool

    def plain(self) -> list[torch.Tensor]:
        """The operands on one device."""
        return [torch.rand(self.shape, requires_grad=self.requires_grad) for _ in range(2)]

    def ours(self, plain: Sequence[torch.Tensor], mesh: spmd.Mesh) -> Callable[[], object]:
        """The operator on our DTensors."""
        operands = [spmd.distribute(x.detach(), self.spec, mesh).requires_grad_(self.requires_grad) for x in plain]
        return functools.partial(OPERATORS[self.name], *operands)

    def torchs(self, plain: Sequence[torch.Tensor], mesh: DeviceMesh) -> Callable[[], object]:
        """The operator on torch's DTensors."""
        dims = [_dim(self.spec, axis) for axis in SIZES[self.mesh]]
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        operands = [distribute_tensor(x.detach(), mesh, placements).requires_grad_(self.requires_grad) for x in plain]
        return functools.partial(OPERATORS[self.name], *operands)


SIGNATURES = [
    Signature(name, mesh, spec, shape, grad)
    for mesh in SIZES
    for name, spec, shape, grad in itertools.product(OPERATORS, SPECS[mesh].values(), SHAPES, (False, True))
]


def signatures() -> Iterator[Times]:
    """Time all signatures, with operands that require gradients and without."""
    meshes = {name: spmd.make_mesh(sizes, runtime="distributed") for name, sizes in SIZES.items()}
    torchs = {
        name: init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for name, sizes in SIZES.items()
    }
    for signature in SIGNATURES:
        plain = signature.plain()
        calls = [
            signature.ours(plain, meshes[signature.mesh]),
            signature.torchs(plain, torchs[signature.mesh]),
            functools.partial(OPERATORS[signature.name], *plain),
        ]
        calls[0]()
        try:
            calls[1]()
        except Exception:  # DTensor has no rule for it: there is nothing to compare with
            del calls[1]
        times = microseconds(calls)
        torch_time = times[1] if len(times) == 3 else None
        yield Times(signature.name, signature.mesh, signature.requires_grad, times[0], torch_time, times[-1])


LISTED, MOVED = "_foreach_add_ of 50", "redistribute, nothing sent"


def our_others() -> dict[str, Callable[[], object]]:
    """A list operator on 50 of our tensors, and a redistribution that sends nothing, from replicas to shards."""
    mesh = spmd.make_mesh({"x": 1}, runtime="distributed")
    ours = [spmd.distribute(torch.rand(8, 8), P(), mesh) for _ in range(50)]
    return {
        LISTED: functools.partial(torch._foreach_add_, ours, 1.0),
        MOVED: lambda: ours[0].redistribute(P("x")),
    }


def others() -> Iterator[Times]:
    """Time what is no operator of a signature."""
    torchs = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    plain = [torch.rand(8, 8) for _ in range(50)]
    theirs = [distribute_tensor(x, torchs, [Replicate()]) for x in plain]
    ours = our_others()
    calls = [ours[LISTED], *(functools.partial(torch._foreach_add_, x, 1.0) for x in (theirs, plain))]
    yield Times(LISTED, "1-D", False, *microseconds(calls))
    moves = [ours[MOVED], lambda: theirs[0].redistribute(torchs, [Shard(0)]), lambda: plain[0][:]]
    yield Times(MOVED, "1-D", False, *microseconds(moves))


def start() -> None:
    """Make this process a job of one rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)


def _all_signatures(name: str) -> Callable[[], object]:
    start()
    meshes = {mesh: spmd.make_mesh(sizes, runtime="distributed") for mesh, sizes in SIZES.items()}
    ours = [each.ours(each.plain(), meshes[each.mesh]) for each in SIGNATURES if each.name == name]
    return lambda: [call() for call in ours]


def _other(name: str) -> Callable[[], object]:
    start()
    return our_others()[name]


CASES: dict[str, Case] = {
    **{name: functools.partial(_all_signatures, name) for name in OPERATORS},
    **{name: functools.partial(_other, name) for name in (LISTED, MOVED)},
}
"""An operator by all its signatures, one after the other."""


def _dim(spec: P, axis: str) -> int | None:
    return next((dim for dim, axes in enumerate(spec.dims) if axis in axes), None)


def main() -> int:
    """Print the tables; the exit status is 1 if the median signature costs more than torch's DTensor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    start()
    found = list(signatures())
    console = Console()
    table = Table(title="Microseconds a call, and ours over DTensor's; medians", title_justify="left")
    for column in ("operator", "ours", "DTensor", "plain", "ratio"):
        table.add_column(column, justify="left" if column == "operator" else "right")
    groups: dict[str, list[Times]] = collections.defaultdict(list)
    for row in found:
        groups[row.name].append(row)
        groups[f"all, {'with' if row.requires_grad else 'without'} gradients"].append(row)
        groups[f"all, {row.mesh} mesh"].append(row)
    groups["all"] = found
    groups |= {row.name: [row] for row in others()}
    for name, rows in groups.items():
        both = [row for row in rows if row.torchs is not None]
        table.add_row(
            name,
            f"{statistics.median(row.ours for row in rows):.1f}",
            f"{statistics.median(row.torchs for row in both):.1f}" if both else "fails",
            f"{statistics.median(row.plain for row in rows):.1f}",
            f"{ratio(both):.2f}" if both else "",
        )
    console.print(table)
    misses = operator_cache.program_of.cache_info().misses
    console.print(f"{len(found)} signatures, of operators of which {misses} were planned, at their first calls")
    dist.destroy_process_group()
    return int(ratio([row for row in found if row.torchs is not None]) > 1)


def ratio(rows: Sequence[Times]) -> float:
    """The median of ours over torch's DTensor."""
    return statistics.median(row.ours / row.torchs for row in rows if row.torchs is not None)


if __name__ == "__main__":
    raise SystemExit(main())
