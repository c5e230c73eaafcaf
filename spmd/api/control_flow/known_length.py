"""The loop of known length behind `scan`, `fori_loop` and `map`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spmd.api.control_flow.carry import Carry, settled
from spmd.api.control_flow.leaves import Leaves, check_callable, device_of, leaves_of
from spmd.api.control_flow.new_values import new_values
from spmd.api.control_flow.place import in_program
from spmd.api.control_flow.results import Results
from spmd.api.control_flow.trips import Body, scan_by_trips
from spmd.api.control_flow.unwritten import called
from spmd.core.pytree import structure_text
from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.tracing.draw_scopes import in_trips
from spmd.tracing.source import where


def loop(
    call: str,
    name: str,
    f: Callable[[Any, Any], Any],
    init: Any,
    xs: Any,
    length: Any = None,
    reverse: bool = False,
    unroll: Any = 1,
    segments: Any = None,
) -> tuple[Any, Any]:
    """Run `scan` under the name of the function that the user calls, and of the function that is one trip of it."""
    check_callable(call, [(name, f)])
    start, rows = leaves_of(init, call, "init"), leaves_of(xs, call, "xs")
    trips = number_of_rows(rows, length, call)
    block, segment = _trips_of_a_block(unroll, trips, call), _trips_of_a_segment(segments, trips, call)
    device = device_of(init, xs)

    in_own_scope, xs_of_trips = in_trips(rows.values, trips)

    def run(carry: Carry) -> tuple[Any, Any]:
        results = Results(call, device)

        def body(values: list[Tensor], x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            pair = called(f, carry.tree(values), rows.structure.unflatten(x), call=call, name=name)
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TraceError(
                    f"{call} at {where()}: {name} must return a pair, the next carry and a result (got "
                    f"{structure_text(pair)}). Return (carry, None) where there is no result."
                )
            return carry.next(pair[0]), results.tensors(pair[1], name)

        finals, ys = _run(in_own_scope(body), carry.values, xs_of_trips, trips, reverse, block, segment)
        return carry.tree(new_values(finals, (*carry.values, *rows.values))), results.tree(ys)

    return settled(Carry.of(start, call, name, device), run)


def number_of_rows(rows: Leaves, length: Any, call: str) -> int:
    """The number of trips.

    Raises:
        TraceError: rows and the argument `length` do not agree on one.
    """
    call = f"{call} at {where()}"
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 0):
        shown = f"{type(length).__name__} {length!r:.60}"
        raise TraceError(f"{call}: length must be an integer of 0 or more (got {shown}).")
    got: object
    for path, x in zip(rows.paths, rows.values, strict=True):
        if not isinstance(x, Tensor) or not x.ndim:
            got = TensorMeta.of(x) if isinstance(x, Tensor) else f"{type(x).__name__} {x!r:.60}"
            raise TraceError(f"{call}: xs{path} has no dim to scan over (got {got}). Stack what the trips read.")
    lengths = {f"xs{path}": x.shape[0] for path, x in zip(rows.paths, rows.values, strict=True)}
    if length is not None:
        lengths = {"length": length, **lengths}
    if not lengths:
        raise TraceError(f"{call} has no tensor in xs, which says how many trips it makes. Pass xs, or length=.")
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} has {rows}" for name, rows in lengths.items()).replace("length has", "length is")
        raise TraceError(f"{call}: all xs must have the same number of rows in dim 0 (got: {shown}).")
    return next(iter(lengths.values()))


def _trips_of_a_block(unroll: Any, trips: int, call: str) -> int:
    """How many trips the program holds, from the argument `unroll`."""
    if not isinstance(unroll, int) or unroll < 0:
        got = f"{type(unroll).__name__} {unroll!r:.60}"
        raise TraceError(f"{call} at {where()}: unroll must be a bool or an integer of 0 or more (got {got}).")
    return 1 if unroll is False else max(trips, 1) if unroll is True else unroll or max(trips, 1)


def _trips_of_a_segment(segments: Any, trips: int, call: str) -> int | None:
    """How many trips reverse mode computes again at once, from the argument `segments`."""
    if segments is None:
        return None
    if isinstance(segments, bool) or not isinstance(segments, int) or segments < 1:
        raise TraceError(f"{call} at {where()}: segments must be an integer of 1 or more (got {segments!r:.60}).")
    return -(-trips // segments)


def _run(
    body: Body,
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    length: int,
    reverse: bool,
    block: int,
    segment: int | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a loop; in a program as one over blocks of trips, and in segments if it has any."""
    if not in_program():
        return scan_by_trips(body, init, xs, length, reverse)
    from spmd.tracing.loops import traced_scan  # with the rules, which `import spmd` leaves out

    def run_trips(carry: Sequence[Tensor], x: Sequence[Tensor], count: int) -> tuple[list[Tensor], list[Tensor]]:
        return scan_by_trips(body, carry, x, count, reverse)

    def run(carry: Sequence[Tensor], x: Sequence[Tensor], count: int) -> tuple[list[Tensor], list[Tensor]]:
        if block == 1 or count < 2:
            return traced_scan(body, carry, x, count, reverse)
        return _in_blocks(carry, x, count, block, reverse, run_trips)

    def run_again(carry: Sequence[Tensor], x: Sequence[Tensor], count: int) -> tuple[list[Tensor], list[Tensor]]:
        results: tuple[list[Tensor], list[Tensor]] = checkpoint(run, carry, x, count, use_reentrant=False)
        return results

    return _in_blocks(init, xs, length, segment, reverse, run_again) if segment else run(init, xs, length)


def _in_blocks(
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    length: int,
    block: int,
    reverse: bool,
    run: Callable[[Sequence[Tensor], Sequence[Tensor], int], tuple[list[Tensor], list[Tensor]]],
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a loop over blocks of trips, each by `run`, and the trips that remain."""
    from spmd.tracing.loops import traced_scan  # as in `_run`

    if length <= block:
        return run(init, xs, length)
    whole = length - length % block
    blocks = [x[:whole].unflatten(0, (whole // block, block)) for x in xs]

    def run_blocks(carry: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        carry, ys = traced_scan(lambda carry, x: run(carry, x, block), carry, blocks, whole // block, reverse)
        return carry, [y.flatten(0, 1) for y in ys]

    def run_rest(carry: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return run(carry, [x[whole:] for x in xs], length - whole)

    if whole == length:
        return run_blocks(init)
    if reverse:
        carry, rest = run_rest(init)
        finals, ys = run_blocks(carry)
    else:
        carry, ys = run_blocks(init)
        finals, rest = run_rest(carry)
    return finals, [torch.cat(parts) for parts in zip(ys, rest, strict=True)]
