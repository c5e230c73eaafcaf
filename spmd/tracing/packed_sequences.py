"""Packed sequences and recurrent layers on them in a trace, where the lengths are known.

torch's packed data mix samples, so that shards of a batch have other shapes on each rank. Here a recurrent layer
computes on the padded batch, in its own order. Packed data are gathered from
the padded ones for who reads them, and the program drops the gather if nobody does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.errors import TraceError
from spmd.tracing.recurrent import CELLS, RecurrentLayers, run_layers, run_plain
from spmd.tracing.source import user_source, where
from spmd.tracing.traced_tensor import known_value

_PADDED, _SELECTED = "_spmd_padded", "_spmd_selected"
"""The attributes of tensors that say from which padded batch they were packed, and from which tensor selected."""


@attrs.frozen(eq=False)
class Padded:
    """A padded batch.

    Args:
        data: [time, batch, ...].
        lengths: of each sample.
        order: the position in the batch of each sample of the packed data, which are sorted by length.
    """

    data: Tensor
    lengths: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def batch_sizes(self) -> list[int]:
        """How many samples are longer than each time."""
        return [sum(length > time for length in self.lengths) for time in range(max(self.lengths, default=0))]

    def packed(self) -> Tensor:
        """The packed data, which know the batch."""
        count, size = len(self.lengths), self.batch_sizes
        places = [time * count + sample for time in range(len(size)) for sample in self.order[: size[time]]]
        flat = self.data.reshape(-1, *self.data.shape[2:])
        found = flat.index_select(0, torch.tensor(places, dtype=torch.int64, device=flat.device))
        setattr(found, _PADDED, self)
        return found

    def masked(self, value: float) -> Tensor:
        """The batch with a value behind the ends."""
        if min(self.lengths, default=0) == self.data.shape[0]:
            return self.data
        times = torch.arange(self.data.shape[0], device=self.data.device)
        inside = times[:, None] < torch.tensor(self.lengths, device=self.data.device)
        return torch.where(inside.reshape(*inside.shape, *[1] * (self.data.ndim - 2)), self.data, value)


def pack(data: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """As `torch._VF._pack_padded_sequence`: packed data, and the batch size of each time."""
    known = _lengths(lengths, "pack_padded_sequence", "lengths")
    if list(known) != sorted(known, reverse=True) or min(known, default=1) < 1:
        raise TraceError(
            f"The lengths of pack_padded_sequence at {where(user_source())} must be positive and sorted, longest first "
            f"(got {list(known)}). Pass enforce_sorted=False for another order."
        )
    batch, dim = (0, 1) if batch_first else (1, 0)
    if len(known) != data.shape[batch] or max(known, default=0) > data.shape[dim]:
        raise TraceError(
            f"pack_padded_sequence at {where(user_source())} needs {data.shape[batch]} lengths of at most "
            f"{data.shape[dim]} (got {list(known)})."
        )
    source, order = _before_selection(data, batch)
    source = source.transpose(0, 1) if batch_first else source
    by_position = sorted(zip(order, known, strict=True))
    padded = Padded(source[: max(known)], tuple(length for _, length in by_position), order)
    return padded.packed(), torch.tensor(padded.batch_sizes)


def pad(data: Tensor, sizes: Tensor, batch_first: bool, value: float, length: int) -> tuple[Tensor, Tensor]:
    """As `torch._VF._pad_packed_sequence`: the padded batch, sorted by length, and its lengths."""
    padded = _padded(data, sizes, "pad_packed_sequence")
    batch = padded.masked(value)
    missing = length - batch.shape[0]
    if missing:
        batch = torch.cat([batch, batch.new_full((missing, *batch.shape[1:]), value)])
    batch = batch.transpose(0, 1) if batch_first else batch
    found = _selected(batch, 0 if batch_first else 1, padded.order)
    return found, torch.tensor([padded.lengths[sample] for sample in padded.order])


def index_select(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`torch.index_select`; back from sorted to original order it returns the tensor that was sorted."""
    found = torch.index_select(x, *args, **kwargs)
    if len(args) != 2 or kwargs:  # torch's own functions of packed sequences pass both by position
        return found
    dim, index = args[0] % max(x.ndim, 1), args[1]
    source, order = _before_selection(x, dim)
    known = None if source is x else known_value(index)
    if known is not None and [order[place] for place in known.tolist()] == list(range(len(order))):
        return source
    setattr(found, _SELECTED, (x, index, dim))
    return found


def recurrent(kind: str) -> Callable[..., Any]:
    """`torch._VF.lstm`, `gru`, `rnn_tanh` or `rnn_relu` by steps, also of packed data."""
    plain = getattr(torch._VF, kind)  # type: ignore[attr-defined]

    def by_steps(
        x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], bias: bool, count: int, dropout: float,
        train: bool, both: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        layers = RecurrentLayers(CELLS[kind], weights, bias, count, dropout if train else 0.0, both)
        output, final = run_plain(layers, x.transpose(0, 1) if batch_first else x, states)
        return output.transpose(0, 1) if batch_first else output, *final

    def run(*args: Any) -> Any:
        if not isinstance(args[1], Tensor) or isinstance(args[3], bool):  # (input, hx, weights, bias, ...)
            return by_steps(*args) if kind == "lstm" and args[0].device.type == "cpu" else plain(*args)
        data, sizes, states, weights, bias, count, dropout, train, both = args
        padded = _padded(data, sizes, f"torch.nn.{kind.upper()}")
        given = states if isinstance(states, (tuple, list)) else (states,)
        layers = RecurrentLayers(CELLS[kind], weights, bias, count, dropout if train else 0.0, both)
        initial = [_in_order(state, padded.order) for state in given]
        noise = lambda width: _noise(padded, data, width, layers.dropout)  # noqa: E731
        output, final = run_layers(layers, padded.masked(0.0), padded.lengths, initial, noise)
        found = [_selected(state, 1, padded.order) for state in final]
        return attrs.evolve(padded, data=output).packed(), *found

    return run


def _noise(padded: Padded, like: Tensor, width: int, p: float) -> Tensor:
    """What dropout multiplies the padded batch with; it draws for packed data, as on one device."""
    drawn = torch.dropout(like.new_ones(sum(padded.lengths), width), p, True)
    return _from_packed(drawn, padded.lengths, padded.order)


def _from_packed(data: Tensor, lengths: Sequence[int], order: Sequence[int]) -> Tensor:
    """The padded batch [time, batch, ...] of packed data; behind the ends of samples it has any values."""
    count, rank = len(lengths), {sample: at for at, sample in enumerate(order)}
    sizes = [sum(length > time for length in lengths) for time in range(max(lengths))]
    starts = [sum(sizes[:time]) for time in range(len(sizes))]
    places = [
        starts[time] + rank[sample] if rank[sample] < sizes[time] else 0
        for time in range(len(sizes))
        for sample in range(count)
    ]
    found = data.index_select(0, torch.tensor(places, dtype=torch.int64, device=data.device))
    return found.reshape(len(sizes), count, *data.shape[1:])


def _padded(data: Tensor, sizes: Tensor, function: str) -> Padded:
    """The padded batch of packed data: that from which they were packed, if they are as they were."""
    known = _lengths(sizes, function, "batch_sizes")
    held = getattr(data, _PADDED, None)
    if isinstance(held, Padded) and held.batch_sizes == list(known):
        return held
    lengths = tuple(sum(size > sample for size in known) for sample in range(known[0]))
    order = tuple(range(len(lengths)))
    return Padded(_from_packed(data, lengths, order), lengths, order)


def _lengths(tensor: Tensor, function: str, name: str) -> tuple[int, ...]:
    known = known_value(tensor)
    if known is None:
        raise TraceError(
            f"{function} at {where(user_source())} needs the values of {name}, which depend on an argument, and a "
            "program has static shapes. Pass the lengths as a static argument, a tuple of ints (static_argnums), or "
            "close over them."
        )
    return tuple(known.tolist())


def _before_selection(tensor: Tensor, dim: int) -> tuple[Tensor, tuple[int, ...]]:
    """The tensor that was sorted along a dim, and the order; itself, if it was not."""
    source, index, along = getattr(tensor, _SELECTED, (tensor, tensor, None))
    if along == dim and tensor.shape == source.shape:
        known = known_value(index)
        if known is not None and sorted(known.tolist()) == list(range(source.shape[dim])):
            return source, tuple(known.tolist())
    return tensor, tuple(range(tensor.shape[dim] if tensor.ndim else 1))


def _selected(tensor: Tensor, dim: int, order: tuple[int, ...]) -> Tensor:
    """A tensor sorted along a dim, which knows from what."""
    if order == tuple(range(len(order))):
        return tensor
    return index_select(tensor, dim, torch.tensor(order, device=tensor.device))


def _in_order(state: Tensor, order: tuple[int, ...]) -> Tensor:
    """A state [layers, batch, ...] in the order of the batch, from that of packed data."""
    source, sorted_by = _before_selection(state, 1)
    if sorted_by == order:
        return source
    places = sorted(range(len(order)), key=order.__getitem__)
    return state.index_select(1, torch.tensor(places, device=state.device))


_VF: Any = torch._VF  # type: ignore[attr-defined]
OF_KNOWN_LENGTHS: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType({
    _VF._pack_padded_sequence: pack,
    _VF._pad_packed_sequence: pad,
    torch.index_select: index_select,
    torch.Tensor.index_select: index_select,
    **{getattr(_VF, kind): recurrent(kind) for kind in CELLS},
})  # fmt: skip
"""Functions of packed sequences, and what is called in their place in a trace, with lifted arguments."""
