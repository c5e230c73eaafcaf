"""Random small layers, as programs repeat them: a norm, an operator that mixes tokens or channels, a residual."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from proofs.fuzz.draw import Draw

Weights = Mapping[str, Tensor]
Shared = Mapping[str, Tensor]
"""What all layers read: `mask` [tokens, tokens], `angle` [tokens, width of a head / 2] and `memory` [..., 3, width]."""


@attrs.frozen
class Sizes:
    """The sizes of a program's values, which are [batch, tokens, width]; a head has the size `width // heads`."""

    batch: int
    tokens: int
    width: int
    heads: int
    hidden: int


@attrs.frozen(eq=False)
class Part:
    """A part of a layer, or a layer: a function of weights, of a value [..., tokens, width] and of what is shared.

    Args:
        name: what it computes.
        shapes: the shape of each weight.
        parallel: of the weights that tensor parallelism shards, the dim.
        function: keeps the shape of the value.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    parallel: Mapping[str, int]
    function: Callable[[Weights, Tensor, Shared], Tensor]


def layer(draw: Draw, sizes: Sizes, cross: bool = False, small: bool = False) -> Part:
    """A layer of one to three parts, or a small one of one; with `cross` a part reads the memory."""
    if small:
        return _with_residual(draw, sizes, draw.choice(*_SMALL)(draw, sizes))
    makers = [draw.choice(*MIXERS)] if draw.maybe(0.7) else []
    makers += [_cross_attention] if cross else []
    makers += [draw.choice(*CHANNELS)] if draw.maybe(0.8) or not makers else []
    parts = [_with_residual(draw, sizes, maker(draw, sizes)) for maker in makers]
    return _in_turn(parts)


def _in_turn(parts: Sequence[Part]) -> Part:
    """Parts one after the other, with the weights of each under its number."""

    def function(p: Weights, x: Tensor, s: Shared) -> Tensor:
        for number, part in enumerate(parts):
            x = part.function({name: p[f"{number}.{name}"] for name in part.shapes}, x, s)
        return x

    shapes = {f"{n}.{name}": shape for n, part in enumerate(parts) for name, shape in part.shapes.items()}
    parallel = {f"{n}.{name}": dim for n, part in enumerate(parts) for name, dim in part.parallel.items()}
    return Part(" ".join(part.name for part in parts), shapes, parallel, function)


def _with_residual(draw: Draw, sizes: Sizes, part: Part) -> Part:
    """A part between a norm, before or after it, and a residual, whose branch may be scaled by a vector."""
    norm, residual = draw.choice(*NORMS), draw.choice("residual", "residual", "scaled", "none")
    after = draw.maybe(0.2)
    vector = (sizes.width,)
    shapes = {**part.shapes, **({"weight": vector, "bias": vector} if norm.startswith("affine") else {})}
    shapes |= {"scale": vector} if residual == "scaled" else {}

    def function(p: Weights, x: Tensor, s: Shared) -> Tensor:
        y = part.function(p, x if after else NORMS[norm](p, x), s)
        y = NORMS[norm](p, y) if after else y
        return y if residual == "none" else x + (p["scale"] * y if residual == "scaled" else y)

    return Part(f"{norm}{'>' if after else '<'}{part.name}({residual})", shapes, part.parallel, function)


def _rms(p: Weights, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1.0)


NORMS: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "layer": lambda p, x: F.layer_norm(x, x.shape[-1:]),
    "affine layer": lambda p, x: F.layer_norm(x, x.shape[-1:], 1 + p["weight"], p["bias"]),
    "rms": _rms,
    "affine rms": lambda p, x: F.rms_norm(x, x.shape[-1:], 1 + p["weight"], 1.0) + p["bias"],
    "tanh": lambda p, x: torch.tanh(x),
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "square": lambda x: torch.relu(x).square(),
    "elu": F.elu,
}


def _mlp(draw: Draw, sizes: Sizes) -> Part:
    name, biased = draw.choice(*ACTIVATIONS), draw.maybe()

    def function(p: Weights, x: Tensor, s: Shared) -> Tensor:
        hidden = ACTIVATIONS[name](F.linear(x, p["up"], p["up bias"] if biased else None))
        return F.linear(hidden, p["down"], p["down bias"] if biased else None)

    shapes: dict[str, tuple[int, ...]] = {"up": (sizes.hidden, sizes.width), "down": (sizes.width, sizes.hidden)}
    shapes |= {"up bias": (sizes.hidden,), "down bias": (sizes.width,)} if biased else {}
    return Part(f"mlp {name}", shapes, {name: dim for name, dim in _MLP.items() if name in shapes}, function)


_MLP = {"up": 0, "up bias": 0, "down": 1}


def _gated(draw: Draw, sizes: Sizes) -> Part:
    name, packed = draw.choice(*ACTIVATIONS), draw.maybe(0.3)

    def function(p: Weights, x: Tensor, s: Shared) -> Tensor:
        gate, up = (x @ p["both"]).chunk(2, -1) if packed else (x @ p["gate"], x @ p["up"])
        return (ACTIVATIONS[name](gate) * up) @ p["down"]

    up, down = (sizes.width, sizes.hidden), (sizes.hidden, sizes.width)
    ups = {"both": (sizes.width, 2 * sizes.hidden)} if packed else {"gate": up, "up": up}
    return Part(f"gated {name}", {**ups, "down": down}, {**dict.fromkeys(ups, 1), "down": 0}, function)


def _experts(draw: Draw, sizes: Sizes) -> Part:
    name = draw.choice(*ACTIVATIONS)

    def function(p: Weights, x: Tensor, s: Shared) -> Tensor:
        gates = torch.softmax(x @ p["router"], -1)
        hidden = ACTIVATIONS[name](torch.einsum("...td,edf->...tef", x, p["up"]))
        return torch.einsum("...tef,efd,...te->...td", hidden, p["down"], gates)

    count = 4
    shapes = {"up": (count, sizes.width, sizes.hidden), "down": (count, sizes.hidden, sizes.width)}
    return Part(f"experts {name}", {**shapes, "router": (sizes.width, count)}, {"up": 0, "down": 0}, function)


def _attention(draw: Draw, sizes: Sizes) -> Part:
    fused, causal, rotary = draw.maybe(), draw.maybe(0.4), draw.maybe(0.3)
    packed = draw.maybe(0.3)

    def function(p: Weights, x: Tensor, s: Shared) -> Tensor:
        joint = (x @ p["qkv"]).chunk(3, -1) if packed else [x @ p[name] for name in "qkv"]
        q, k, v = (_heads(each, sizes.heads) for each in joint)
        if rotary:
            q, k = _rotated(q, s["angle"]), _rotated(k, s["angle"])
        mask = s["mask"] if causal else None
        y = F.scaled_dot_product_attention(q, k, v, mask) if fused else _attend(q, k, v, mask)
        return y.transpose(-2, -3).flatten(-2) @ p["o"]

    square = (sizes.width, sizes.width)
    inner = {"qkv": (sizes.width, 3 * sizes.width)} if packed else dict.fromkeys("qkv", square)
    traits = [word for word, holds in (("causal", causal), ("rotary", rotary), ("packed", packed)) if holds]
    name = " ".join(["sdpa" if fused else "attention", *traits])
    return Part(name, {**inner, "o": square}, {**dict.fromkeys(inner, 1), "o": 0}, function)


def _cross_attention(draw: Draw, sizes: Sizes) -> Part:
    def function(p: Weights, x: Tensor, s: Shared) -> Tensor:
        memory = s["memory"]
        q, k, v = (_heads(each, sizes.heads) for each in (x @ p["q"], memory @ p["k"], memory @ p["v"]))
        return _attend(q, k, v, None).transpose(-2, -3).flatten(-2) @ p["o"]

    return Part("cross", dict.fromkeys("qkvo", (sizes.width, sizes.width)), {"q": 1, "k": 1, "v": 1, "o": 0}, function)


def _heads(x: Tensor, heads: int) -> Tensor:
    """A value [..., tokens, width] as [..., heads, tokens, width of a head]."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return torch.softmax(scores if mask is None else scores + mask, -1) @ v


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    """A rotary position embedding (Su et al., 2021)."""
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def _convolution(draw: Draw, sizes: Sizes) -> Part:
    grouped, name = draw.maybe(), draw.choice(*ACTIVATIONS)

    def function(p: Weights, x: Tensor, s: Shared) -> Tensor:
        channels_first = x.transpose(-1, -2)
        groups = sizes.width if grouped else 1
        return ACTIVATIONS[name](F.conv1d(channels_first, p["kernel"], padding=1, groups=groups)).transpose(-1, -2)

    shape = (sizes.width, 1 if grouped else sizes.width, 3)
    return Part(f"{'depthwise' if grouped else 'conv1d'} {name}", {"kernel": shape}, {"kernel": 0}, function)


def _of_tokens(draw: Draw, sizes: Sizes) -> Part:
    def function(p: Weights, x: Tensor, s: Shared) -> Tensor:
        return (F.gelu(x.transpose(-1, -2) @ p["up"]) @ p["down"]).transpose(-1, -2)

    shapes = {"up": (sizes.tokens, sizes.hidden), "down": (sizes.hidden, sizes.tokens)}
    return Part("token mlp", shapes, {"up": 1, "down": 0}, function)


def _linear(draw: Draw, sizes: Sizes) -> Part:
    square = (sizes.width, sizes.width)
    return Part("linear", {"w": square}, {"w": 1}, lambda p, x, s: x @ p["w"])


def _pooled(draw: Draw, sizes: Sizes) -> Part:
    def function(p: Weights, x: Tensor, s: Shared) -> Tensor:
        return x * torch.sigmoid(x.mean(-2, keepdim=True) @ p["w"])

    return Part("squeeze", {"w": (sizes.width, sizes.width)}, {"w": 1}, function)


Maker = Callable[[Draw, Sizes], Part]

MIXERS: tuple[Maker, ...] = (_attention, _attention, _attention, _convolution, _of_tokens, _pooled)
"""What mixes tokens."""

CHANNELS: tuple[Maker, ...] = (_mlp, _mlp, _gated, _gated, _experts, _linear)
"""What mixes channels."""

_SMALL: tuple[Maker, ...] = (_linear, _pooled, _convolution, _mlp)
