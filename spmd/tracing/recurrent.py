"""Recurrent layers by steps of cells: plain ones, and ones on a padded batch of which the lengths are known."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

States: TypeAlias = tuple[Tensor, ...]
Cell: TypeAlias = Callable[[Tensor, States, Sequence[Tensor]], States]
"""From the input's part of the gates, the states and the weights of the states to the states; the first is the output.

The weights are `w_hh`, then `b_hh` if there are biases, then `w_hr` of an LSTM with projections.
"""

Direction: TypeAlias = Callable[..., tuple[Tensor, States]]
"""Runs a layer in one direction: `run(layers, x, states, weights, reverse=...)`."""


@attrs.frozen(eq=False)
class RecurrentLayers:
    """The layers of a recurrent module.

    Args:
        cell: one step.
        weights: those of each layer and direction, as torch flattens them.
        bias: whether there are biases.
        count: how many layers.
        dropout: the probability of dropout between layers.
        bidirectional: whether each layer runs backwards, too.
    """

    cell: Cell
    weights: Sequence[Tensor]
    bias: bool
    count: int
    dropout: float
    bidirectional: bool


def run_layers(
    layers: RecurrentLayers,
    x: Tensor,
    lengths: Sequence[int],
    states: Sequence[Tensor],
    noise: Callable[[int], Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """The output [time, batch, features] of the last layer, and the final states of all, [layers, batch, features].

    Args:
        layers: the layers.
        x: the padded batch [time, batch, features].
        lengths: of each sample; the output behind its end has any values.
        states: the initial states of all layers and directions.
        noise: makes what dropout multiplies an output of so many features with.
    """
    run = functools.partial(_run_padded, lengths)
    return _run_layers(layers, x, states, run, lambda x: x * noise(x.shape[-1]))


def run_plain(layers: RecurrentLayers, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Run layers on samples of full length, by torch's operators without oneDNN.

    OneDNN's single operator for a layer saves what its backward needs only if grad mode is on.
    """
    return _run_layers(layers, x, states, run_direction, lambda x: torch.dropout(x, layers.dropout, True))


def _run_layers(
    layers: RecurrentLayers, x: Tensor, states: Sequence[Tensor], run: Direction, dropped: Callable[[Tensor], Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The output of the last layer, and the final states of all layers and directions."""
    directions = 2 if layers.bidirectional else 1
    each = len(layers.weights) // (layers.count * directions)
    final: list[States] = []
    for number in range(layers.count):
        outputs = []
        for direction in range(directions):
            at = number * directions + direction
            weights = layers.weights[at * each : (at + 1) * each]
            start = tuple(state[at] for state in states)
            output, end = run(layers, x, start, weights, reverse=direction == 1)
            outputs.append(output)
            final.append(end)
        x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        if layers.dropout and number + 1 < layers.count:
            x = dropped(x)
    return x, [torch.stack(every) for every in zip(*final, strict=True)]


def run_direction(
    layers: RecurrentLayers, x: Tensor, states: States, weights: Sequence[Tensor], *, reverse: bool
) -> tuple[Tensor, States]:
    """One layer in one direction, of samples that have the full length: its outputs and its final states."""
    w_ih, w_hh, *rest = weights
    steps = F.linear(x, w_ih, rest.pop(0) if layers.bias else None).unbind(0)
    every = []
    for step in reversed(steps) if reverse else steps:
        states = layers.cell(step, states, (w_hh, *rest))
        every.append(states[0])
    return torch.stack(every[::-1] if reverse else every), states


def _run_padded(
    lengths: Sequence[int],
    layers: RecurrentLayers,
    x: Tensor,
    states: States,
    weights: Sequence[Tensor],
    *,
    reverse: bool,
) -> tuple[Tensor, States]:
    """One layer in one direction, of samples of some lengths: its outputs and its final states.

    The steps compute behind the ends of samples, too, so they have no masks.
    """
    w_ih, w_hh, *rest = weights
    states = tuple(state[None] for state in states)
    ends = torch.tensor(lengths, device=x.device)
    times = torch.arange(x.shape[0], device=x.device)[:, None]
    backwards = torch.where(times < ends, ends - 1 - times, times)
    if reverse:
        x = _at_times(x, backwards)
    gates = F.linear(x, w_ih, rest.pop(0) if layers.bias else None)
    every = []
    for time in range(x.shape[0]):
        states = layers.cell(gates[time : time + 1], states, (w_hh, *rest))
        if layers.cell is CELLS["rnn_relu"] and time >= min(lengths):  # its states have no bound
            states = (torch.where((time < ends)[:, None], states[0], 0.0),)
        every.append(states)
    held = tuple(torch.cat(found) for found in zip(*every, strict=True))
    if min(lengths) < x.shape[0]:
        states = tuple(_at_times(found, ends[None] - 1) for found in held)
    return _at_times(held[0], backwards) if reverse else held[0], tuple(state[0] for state in states)


def _at_times(x: Tensor, times: Tensor) -> Tensor:
    """The elements of x [time, batch, features] at other times [time, batch]."""
    return x.gather(0, times[:, :, None].expand(-1, -1, x.shape[-1]))


def _hidden(h: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The state's part of the gates."""
    w_hh, *rest = weights
    bias = rest[0] if rest and rest[0].ndim == 1 else None
    return F.linear(h, w_hh, bias)


def _lstm(x: Tensor, states: States, weights: Sequence[Tensor]) -> States:
    h, c = states
    i, f, g, o = (x + _hidden(h, weights)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    projects = weights[-1].ndim == 2 and len(weights) > 1
    return (F.linear(h, weights[-1]) if projects else h), c


def _gru(x: Tensor, states: States, weights: Sequence[Tensor]) -> States:
    (h,) = states
    r, z, n = x.chunk(3, -1)
    hidden_r, hidden_z, hidden_n = _hidden(h, weights).chunk(3, -1)
    n = (n + (r + hidden_r).sigmoid() * hidden_n).tanh()
    z = (z + hidden_z).sigmoid()
    return ((1 - z) * n + z * h,)


def _simple(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda x, states, weights: (activation(x + _hidden(states[0], weights)),)


CELLS: Mapping[Any, Cell] = MappingProxyType(
    {"lstm": _lstm, "gru": _gru, "rnn_tanh": _simple(torch.tanh), "rnn_relu": _simple(torch.relu)}
)
"""One step of each of torch's recurrent layers."""
