"""Random models that repeat layers: stacks, two of them with cross attention, and unrolled recurrences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from proofs.fuzz.draw import Draw
from proofs.repeated_layers.layers import Part, Shared, Sizes, Weights, layer

Call = Callable[..., Tensor]
"""Calls a function with arguments, as `torch.utils.checkpoint.checkpoint` does."""


@attrs.frozen
class Weight:
    """The shape of a weight, its name within its layer and, if tensor parallelism shards it, the dim.

    Weights of equal layers have equal names, by which they have equal specs.
    """

    shape: tuple[int, ...]
    name: str
    parallel: int | None = None


@attrs.frozen(eq=False)
class Model:
    """A model that repeats layers.

    Args:
        name: its layers.
        sizes: the sizes of its input [batch, tokens, width], or [batch, tokens] of integers with an embedding.
        weights: its weights by name.
        embedded, classified: whether it has a table of `VOCABULARY` rows before its layers, and a product after them.
        forward: of weights, an input (with or without the batch), and what is shared: the result and the result of each
            layer; the last argument calls each layer.
    """

    name: str
    sizes: Sizes
    weights: Mapping[str, Weight]
    embedded: bool
    classified: bool
    forward: Callable[[Weights, Tensor, Shared, Call], tuple[Tensor, list[Tensor]]]


VOCABULARY = 12


def model(draw: Draw, small: bool = False) -> Model:
    """A random model; a small one has one kind of layer, of a few operations, and nothing before it and after it."""
    heads = draw.choice(2, 2, 3, 4)
    sizes = Sizes(
        draw.choice(4, 4, 6, 8, 5), draw.choice(4, 6, 5), heads * draw.choice(2, 4), heads, draw.choice(12, 16, 10)
    )
    if small:
        kind, prefixes = layer(draw, sizes, small=True), [f"layers.{n}" for n in range(draw.integer(4, 7))]
        layers = _Layers(f"{len(prefixes)} x [{kind.name}]", [(prefix, kind) for prefix in prefixes])
        return Model(layers.name, sizes, layers.weights, False, False, layers.run)
    return draw.choice(*[_stack] * 7, *[_two_stacks] * 2, _recurrence)(draw, sizes)


@attrs.frozen(eq=False)
class _Layers:
    """Layers in turn, each with the prefix of its weights."""

    name: str
    layers: Sequence[tuple[str, Part]]

    @property
    def weights(self) -> dict[str, Weight]:
        return {
            f"{prefix}.{name}": Weight(shape, f"{part.name}.{name}", part.parallel.get(name))
            for prefix, part in self.layers
            for name, shape in part.shapes.items()
        }

    def run(self, p: Weights, x: Tensor, s: Shared, call: Call) -> tuple[Tensor, list[Tensor]]:
        """The result of the last layer, and those of all."""
        found = []
        for prefix, part in self.layers:
            x = call(part.function, {name: p[f"{prefix}.{name}"] for name in part.shapes}, x, s)
            found.append(x)
        return x, found


def _layers(draw: Draw, sizes: Sizes, prefix: str, most: int, cross: bool = False) -> _Layers:
    """Four to `most` layers of one kind, or three times two or three kinds, some with another first or last layer.

    Weights may be tied: then layers of one kind have the same.
    """
    kinds = [layer(draw, sizes, cross) for _ in range(draw.choice(1, 1, 1, 1, 2, 2, 3))]
    depth = draw.integer(4, most) if len(kinds) == 1 else 3 * len(kinds) + draw.integer(0, 2)
    tied = draw.maybe(0.15)
    found = [(f"{prefix}.{n % len(kinds) if tied else n}", kinds[n % len(kinds)]) for n in range(depth)]
    name = f"{depth} x [{' / '.join(kind.name for kind in kinds)}]{' tied' if tied else ''}"
    for place, text in ((0, "first"), (-1, "last")):
        if draw.maybe(0.25):
            found[place] = (f"{prefix}.{text}", other := layer(draw, sizes, cross))
            name = f"{name} {text} [{other.name}]"
    return _Layers(name, found)


def _stack(draw: Draw, sizes: Sizes) -> Model:
    layers = _layers(draw, sizes, "layers", 10)
    return _between_ends(draw, sizes, layers.name, layers.weights, layers.run)


def _two_stacks(draw: Draw, sizes: Sizes) -> Model:
    """An encoder, and a decoder that begins with the input reversed."""
    encoder = _layers(draw, sizes, "encoder", 5)
    decoder = _layers(draw, sizes, "decoder", 6, cross=True)

    def run(p: Weights, x: Tensor, s: Shared, call: Call) -> tuple[Tensor, list[Tensor]]:
        memory, before = encoder.run(p, x, s, call)
        y, after = decoder.run(p, x.flip(-2), {**s, "memory": memory}, call)
        return y, [*before, *after]

    return _between_ends(draw, sizes, f"{encoder.name}, {decoder.name}", {**encoder.weights, **decoder.weights}, run)


def _recurrence(draw: Draw, sizes: Sizes) -> Model:
    """One cell over five to eight tokens."""
    sizes = attrs.evolve(sizes, tokens=draw.integer(5, 8))
    kind = draw.choice(*_CELLS)
    gates, cell = _CELLS[kind]
    unbound = draw.maybe(0.7)  # else the operators of steps differ by a number

    def run(p: Weights, x: Tensor, s: Shared, call: Call) -> tuple[Tensor, list[Tensor]]:
        steps = x.unbind(-2) if unbound else [x.select(-2, step) for step in range(sizes.tokens)]
        c = h = torch.zeros_like(steps[0])
        found = []
        for each in steps:
            both = F.linear(each, p["in"], p["bias"]) + F.linear(h, p["hidden"])
            h, c = cell(both, h, c)
            found.append(h)
        return torch.stack(found, -2), found

    rows = gates * sizes.width
    weights = {name: Weight((rows, sizes.width), name, 0) for name in ("in", "hidden")}
    weights["bias"] = Weight((rows,), "bias", 0)
    return _between_ends(draw, sizes, f"{sizes.tokens} x {kind}", weights, run)


def _gru(gates: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    reset, keep, new = gates.chunk(3, -1)
    keep = torch.sigmoid(keep)
    return keep * h + (1 - keep) * torch.tanh(torch.sigmoid(reset) * new), c


def _lstm(gates: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


_CELLS: dict[str, tuple[int, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]]] = {
    "tanh cell": (1, lambda gates, h, c: (torch.tanh(gates), c)),
    "gru cell": (3, _gru),
    "lstm cell": (4, _lstm),
}


def _between_ends(draw: Draw, sizes: Sizes, name: str, weights: Mapping[str, Weight], run: Callable[..., Any]) -> Model:
    """A model with layers between an embedding, a norm and a product, or without some of these."""
    embedded, normed, classified = draw.maybe(0.3), draw.maybe(0.3), draw.maybe(0.4)
    shared_table = embedded and classified and draw.maybe()
    table = Weight((VOCABULARY, sizes.width), "table", 0)
    ends = {"table": table} if embedded or classified else {}
    ends |= {"head": table} if classified and not shared_table else {}

    def forward(p: Weights, x: Tensor, s: Shared, call: Call) -> tuple[Tensor, list[Tensor]]:
        x, found = run(p, F.embedding(x, p["table"]) if embedded else x, s, call)
        x = F.layer_norm(x, x.shape[-1:]) if normed else x
        return (F.linear(x, p["table" if shared_table else "head"]) if classified else x), found

    traits = {"embedded": embedded, "normed": normed, "classified": classified, "shared table": shared_table}
    text = ", ".join([name, *(trait for trait, holds in traits.items() if holds)])
    return Model(text, sizes, {**weights, **ends}, embedded, classified, forward)
