"""Which rows every rank of a `ragged_all_to_all` sends to every other, read on the host when it runs.

The sizes are data, and torch's exchange takes them as Python integers, so each rank needs them on the host before it
can start. A rank knows what it sends and what it expects; all ranks gather these into one table, so that all of them
find the same errors, before any row is sent. The table is an int64 tensor `[rank, column, other rank]` with six
columns: the four vectors of `spmd.collectives.ragged_all_to_all`, and the numbers of rows of operand and output, each
repeated for every other rank, because the shards of ranks may differ in length.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from spmd.errors import DivergenceError, SpmdError

_Matrix = list[list[int]]


@attrs.frozen
class Routes:
    """The rows that ranks send to each other: each field is a matrix, by sender and receiver.

    Args:
        starts: the first row, in the sender's operand.
        places: where it goes, in the receiver's result.
        counts: the number of rows.
        accumulate: whether rows that several ranks send to one place are added; if not, there are none.
    """

    starts: _Matrix
    places: _Matrix
    counts: _Matrix
    accumulate: bool

    @classmethod
    def read(cls, table: Tensor, transposed: bool, ranks: Sequence[int]) -> Routes:
        """Read a table.

        Args:
            table: the table, on any device.
            transposed: whether every row goes the other way: from where it would be received to where it is sent from.
            ranks: the numbers of the ranks, in the order of the table, for messages.

        Raises:
            DivergenceError: two ranks that name different sizes for what one sends to the other.
            SpmdError: rows that are out of range, or places that two ranks send to.
        """
        starts, counts, places, expected, rows, capacity = table.cpu().unbind(1)
        _check(counts, expected.T, ranks)
        _check_range("operand", starts, counts, rows, ranks)
        _check_range("output", places, counts, capacity.T, ranks)
        _check_disjoint(places.T, counts.T, ranks)
        if transposed:
            starts, places, counts = places.T, starts.T, counts.T
        return cls(starts.tolist(), places.tolist(), counts.tolist(), transposed)

    def sent(self, sender: int) -> int:
        """The number of rows that a rank sends to others."""
        return sum(self.counts[sender]) - self.counts[sender][sender]

    def taken(self, x: Tensor, sender: int, receiver: int) -> Tensor:
        """The rows of a rank's operand that it sends to another: a view."""
        return x.narrow(0, self.starts[sender][receiver], self.counts[sender][receiver])

    def place(self, result: Tensor, rows: Tensor, sender: int, receiver: int) -> None:
        """Write or add rows that a rank receives from another to its result."""
        target = result.narrow(0, self.places[sender][receiver], self.counts[sender][receiver])
        if self.accumulate:
            target.add_(rows)
        else:
            target.copy_(rows)


def exchange_rows(routes: Routes, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """The results of all ranks, with `sizes` rows each, from the operands of all."""
    results = [x.new_zeros((size, *x.shape[1:])) for x, size in zip(operands, sizes, strict=True)]
    for receiver, result in enumerate(results):
        for sender, x in enumerate(operands):
            if routes.counts[sender][receiver]:
                routes.place(result, routes.taken(x, sender, receiver), sender, receiver)
    return results


def _first(found: Tensor) -> tuple[int, int] | None:
    """The indices of the first element of a matrix that is true."""
    where = found.nonzero()
    return (int(where[0, 0]), int(where[0, 1])) if len(where) else None


def _check(counts: Tensor, expected: Tensor, ranks: Sequence[int]) -> None:
    """Check that all senders and receivers name the same sizes."""
    found = _first(counts != expected)
    if found is not None:
        sender, receiver = ranks[found[0]], ranks[found[1]]
        raise DivergenceError(
            f"ragged_all_to_all: rank {sender} sends {int(counts[found])} rows to rank {receiver}, which expects "
            f"{int(expected[found])} of it. Expected send_sizes[i] of rank j to be recv_sizes[j] of rank i: "
            "recv_sizes = all_to_all(send_sizes, axis_name, 0, 0, tiled=True)."
        )
    found = _first(counts < 0)
    if found is not None:
        raise SpmdError(
            f"ragged_all_to_all: send_sizes of rank {ranks[found[0]]} has {int(counts[found])} for rank "
            f"{ranks[found[1]]}. Expected no negative sizes."
        )


def _check_range(what: str, first: Tensor, counts: Tensor, length: Tensor, ranks: Sequence[int]) -> None:
    """Check that all rows that are sent are rows of the sender's operand, or of the receiver's output."""
    found = _first((counts > 0) & ((first < 0) | (first + counts > length)))
    if found is not None:
        start, stop = int(first[found]), int(first[found] + counts[found])
        sender, receiver = ranks[found[0]], ranks[found[1]]
        owner = f"rank {sender}" if what == "operand" else f"rank {receiver}"
        name = "input_offsets" if what == "operand" else "output_offsets"
        raise SpmdError(
            f"ragged_all_to_all: rank {sender} sends to rank {receiver} rows {start} to {stop} of the {what} of "
            f"{owner}, which has {int(length[found])} rows. Expected {name} + send_sizes of rank {sender} to "
            "be at most that."
        )


def _check_disjoint(places: Tensor, counts: Tensor, ranks: Sequence[int]) -> None:
    """Check that no two ranks send to one place; `places` and `counts` are by receiver and sender."""
    starts, order = torch.where(counts > 0, places, torch.iinfo(places.dtype).max).sort(1)
    stops = starts + counts.gather(1, order).clamp(min=0)
    stops = torch.where(counts.gather(1, order) > 0, stops, starts)
    found = _first(stops[:, :-1] > starts[:, 1:])
    if found is not None:
        receiver, position = found
        one, other = (ranks[int(order[receiver, position + step])] for step in (0, 1))
        start, stop = int(starts[receiver, position + 1]), int(stops[receiver, position])
        raise SpmdError(
            f"ragged_all_to_all: ranks {one} and {other} both send to rows {start} to {stop} of the output of rank "
            f"{ranks[receiver]}. Expected rows of the output that are written once: which one stays would depend on "
            "the order."
        )
