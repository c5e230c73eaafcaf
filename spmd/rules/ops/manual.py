"""Manual regions along the mesh axes that stay automatic in them: collectives, casts, and the ends of a region.

Along an axis that a collective does not name, it runs on shards of every dim but those that it joins or splits, and
keeps sums over that axis. Along its own axes it runs as it stands, which the planner knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmd.collectives.callbacks import CHECK, DEBUG_CALLBACK
from spmd.collectives.host import HOST_PRINT
from spmd.collectives.manual import ENTER, LEAVE
from spmd.core.spec_text import parse_spec
from spmd.ir.call import Call
from spmd.ir.recompute import RECOMPUTE
from spmd.rules.builders import pointwise, rule
from spmd.rules.notation import Rows, factors
from spmd.rules.partial import carry, linear
from spmd.rules.rule import FactorDims, Factors, Rule, Table

_ops = torch.ops.spmd


def _passing(*dims: str, rows: Rows, size_argument: int | None = None) -> Rule:
    """The rule of a collective that joins or splits the dims which the arguments `dims` name."""

    def make(call: Call) -> Factors:
        fixed = {call.argument(name) for name in dims}
        names: FactorDims = tuple(() if dim in fixed else (f"d{dim}",) for dim in range(call.operands[0].ndim))
        sizes = {f"d{dim}": size for dim, size in enumerate(call.operands[0].shape) if dim not in fixed}
        return Factors((names,), (names,), sizes)

    return rule(make, rows, size_argument=size_argument)


def _ragged(call: Call) -> Factors:
    """Rows are sent whole, so every other dim passes through; all ranks need all of the table."""
    x, table = call.operands
    names: FactorDims = ((), *((f"d{dim}",) for dim in range(1, x.ndim)))
    sizes = {f"d{dim}": size for dim, size in enumerate(x.shape) if dim}
    return Factors((names, ((),) * table.ndim), (names,), sizes)


def _all_reduce(call: Call) -> Rule:
    """A sum over one axis of a sum over another; likewise a maximum, a minimum."""
    return _passing(rows=linear("x") if call.argument("op") == "sum" else carry("x"))


def _end(call: Call) -> Factors:
    """The factors of an `enter` or a `leave`: a dim that is sharded evenly has one for each mesh axis, and one inside.

    Those of the mesh axes, and dims with uneven shards, are not sharded along other axes.
    """
    x, result = call.operands[0], call.results[0]
    whole, part = (x, result) if call.op is ENTER else (result, x)
    axes = dict(zip(call.argument("axes"), call.argument("sizes"), strict=True))
    spec = parse_spec(call.argument("spec"))
    outside: list[tuple[str, ...]] = []
    inside: list[tuple[str, ...]] = []
    sizes: dict[str, int] = {}
    fixed: set[str] = set()
    for dim, (size, local) in enumerate(zip(whole.shape, part.shape, strict=True)):
        cut = [(axis, axes[axis]) for axis in _of(spec.dims, dim) if axes[axis] > 1]
        name = f"d{dim}"
        if cut and (size == 0 or _product(cut) * local != size):
            outside.append(())
            inside.append(())
            continue
        sizes |= {f"{name}_{axis}": count for axis, count in cut} | {name: local}
        fixed |= {f"{name}_{axis}" for axis, _ in cut}
        own = (name,) if local != 1 or not cut else ()
        outside.append((*(f"{name}_{axis}" for axis, _ in cut), *own))
        inside.append((name,) if own or not cut else ())
    found = tuple(outside), tuple(inside)
    operands, results = found if call.op is ENTER else found[::-1]
    return Factors((operands,), (results,), sizes, replicate=frozenset(fixed))


def _of(dims: Sequence[tuple[str, ...]], dim: int) -> tuple[str, ...]:
    return dims[dim] if dim < len(dims) else ()


def _product(cut: Sequence[tuple[str, int]]) -> int:
    found = 1
    for _, count in cut:
        found *= count
    return found


_END = rule(_end, carry("x"))


def _printed(call: Call) -> Factors:
    """The factors of `host_print` and callbacks: each dim of each value is one, since a rank prints its shards.

    There are none for pending sums: a rank would print its summand.
    """
    dims = [tuple((f"v{number}_d{dim}",) for dim in range(x.ndim)) for number, x in enumerate(call.operands)]
    sizes = {f"v{number}_d{dim}": n for number, x in enumerate(call.operands) for dim, n in enumerate(x.shape)}
    return Factors(tuple(dims), (((),),), sizes, independent=frozenset(sizes), separate=True)


MANUAL: Table = {
    ENTER: _END,
    LEAVE: _END,
    _ops.all_reduce.default: Rule(lambda call: _all_reduce(call).factorize(call)),
    _ops.all_gather.default: _passing("dim", rows=carry("x")),
    _ops.reduce_scatter.default: _passing("dim", rows=linear("x")),
    _ops.all_to_all.default: _passing("split_dim", "concat_dim", rows=carry("x")),
    _ops.permute.default: _passing(rows=linear("x"), size_argument=2),
    _ops.ragged_all_to_all.default: rule(_ragged, linear("x")),
    _ops.shard.default: _passing("dim", rows=carry("x")),
    _ops.to_partial.default: _passing(rows=linear("x")),
    _ops.pcast.default: _passing(rows=carry("x")),
    _ops.axis_index.default: factors(" -> "),
    _ops.shard_offset.default: factors(" -> "),
    HOST_PRINT: rule(_printed),
    DEBUG_CALLBACK: rule(_printed),
    CHECK: rule(_printed),
    RECOMPUTE: pointwise(carry("x")),
}
"""The operators of `spmd` that a program may call."""
