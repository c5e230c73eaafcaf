"""The ordinary torch code of per-rank programs: templates in the operands `{a}` and `{b}`, with what they require.

A template with `{d}` needs a dim of `a`; none names a length, which ranks with uneven shards may differ in. All are
smooth where values of programs can be, or have one derivative in the reference and in the program.
"""

from __future__ import annotations

from types import MappingProxyType

import attrs


@attrs.frozen
class Unary:
    """A function of one tensor with at least `ndim` dims."""

    text: str
    ndim: int = 0


@attrs.frozen
class Binary:
    """A function of two tensors, of equal shapes if `same`; else they must broadcast, or whatever torch accepts."""

    text: str
    ndim: int = 0
    same: bool = False


LINEAR: tuple[Unary, ...] = (
    Unary("{a} * 0.5"),
    Unary("-{a}"),
    Unary("{a} / 3"),
    Unary("2 * {a}.clone()"),
    Unary("{a} - 0.25 * {a}"),
    Unary("{a} * torch.linspace(0.2, 1.0, {a}.numel()).reshape({a}.shape)"),
    Unary("{a}.sum()"),
    Unary("{a}.sum({d})", 1),
    Unary("{a}.sum({d}, keepdim=True)", 1),
    Unary("{a}.mean({d})", 1),
    Unary("{a}.reshape(-1)", 1),
    Unary("{a}.unsqueeze({d})", 1),
    Unary("{a}.transpose(0, -1)", 2),
    Unary("{a}.flip({d})", 1),
    Unary("{a}.narrow({d}, 0, 1)", 1),
    Unary("{a}[..., -1]", 1),
    Unary("{a}[::2]", 1),
    Unary("{a}.cumsum({d})", 1),
    Unary("torch.cat([{a}, 0.5 * {a}], {d})", 1),
    Unary("torch.stack([{a}, -{a}])"),
    Unary("{a}.expand(2, *{a}.shape)"),
    Unary("{a}.roll(1, {d})", 1),
    Unary("F.pad({a}, (1, 0))", 1),
    Unary("{a}.repeat_interleave(2, {d})", 1),
    Unary("{a}.index_select({d}, torch.tensor([0, {a}.shape[{d}] - 1, 0]))", 1),
)
"""Linear functions, which unreduced values may meet."""

POINTWISE: tuple[Unary, ...] = (
    *(Unary(f"torch.{name}({{a}})") for name in ("tanh", "sin", "cos", "sigmoid", "atan", "erf")),
    *(Unary(f"F.{name}({{a}})") for name in ("gelu", "silu", "softplus", "relu", "elu", "mish")),
    Unary("{a} ** 2"),
    Unary("1.5 - {a}"),
    Unary("1 / (1 + {a} * {a})"),
    Unary("torch.exp(-{a} * {a})"),
    Unary("torch.sqrt({a} * {a} + 0.5)"),
    Unary("torch.log1p({a} * {a})"),
    Unary("torch.where({a} > 0.1, {a}, 0.3 * {a})"),
    Unary("{a}.masked_fill({a} > 0.4, 0.25)"),
    Unary("{a}.clone().mul_(0.7).add_(0.1)"),
    Unary("{a}.detach() * {a}"),
)

SHAPED: tuple[Unary, ...] = (
    Unary("torch.softmax({a}, {d})", 1),
    Unary("torch.log_softmax({a}, {d})", 1),
    Unary("{a}.logsumexp({d})", 1),
    Unary("{a} - {a}.mean({d}, keepdim=True)", 1),
    Unary("({a} - {a}.mean(-1, keepdim=True)) / ({a}.var(-1, correction=0, keepdim=True) + 0.1).sqrt()", 1),
    Unary("{a}.amax({d})", 1),
    Unary("({a} * {a}).sum({d}).add(0.3).sqrt()", 1),
    Unary("{a} @ {a}.transpose(-1, -2)", 2),
    Unary("torch.einsum('...i,...j->...ij', {a}, {a})", 1),
    Unary("{a}.tril()", 2),
    Unary("torch.outer({a}.reshape(-1), {a}.reshape(-1)).sum(1)", 1),
)

CONSTANTS: tuple[str, ...] = (
    "torch.linspace(-0.9, 1.1, {n})",
    "torch.tensor(0.8)",
    "torch.eye({n})",
    "torch.arange({n}) * 0.2",
)
"""Tensors that depend on nothing, of a length `{n}`."""

BINARY: tuple[Binary, ...] = (
    Binary("{a} + {b}"),
    Binary("{a} - 0.5 * {b}"),
    Binary("{a} * {b}"),
    Binary("{a} / (1 + {b} * {b})"),
    Binary("torch.where({b} > 0.05, {a}, 0.2 * {b})"),
    Binary("torch.lerp({a}, {b}, 0.3)"),
    Binary("torch.addcmul({a}, {b}, {b}, value=0.5)"),
    Binary("torch.tanh({a}) * torch.cos({b})"),
    Binary("{a} @ {b}", 1),
    Binary("{a} @ {b}.transpose(-1, -2)", 2),
    Binary("F.linear({a}, {b})", 1),
    Binary("torch.cat([{a}, {b}], -1)", 1),
    Binary("torch.stack([{a}, {b}], -1)", same=True),
    Binary("torch.einsum('...i,...i->...', {a}, {b})", 1, same=True),
    Binary("F.mse_loss({a}, {b})", same=True),
    Binary("{a}.reshape(-1, 1) * {b}.reshape(1, -1)", 1),
    Binary("torch._foreach_mul([{a}, {b}], [{b}, {a}])[0] + {a}", same=True),
)

IN_PLACE: tuple[Binary, ...] = (
    Binary("{a}.clone().add_({b})", same=True),
    Binary("{a}.clone().mul_(torch.cos({b}))", same=True),
    Binary("{a}.index_add(0, torch.tensor([0]), {b}[:1])", 1, same=True),
)
"""Writes of `b` to a copy of `a`, which must be of the same type."""

BILINEAR: tuple[Binary, ...] = (
    Binary("{a} * {b}"),
    Binary("{b} * {a}"),
    Binary("{a} @ {b}", 1),
    Binary("{b} @ {a}", 1),
    Binary("{a} / (1 + {b} * {b})"),
)
"""Linear in `a`, which may be unreduced where `b` is invariant or reduced."""

ADDITIVE: tuple[Binary, ...] = (
    Binary("{a} + {b}"),
    Binary("{a} - 0.5 * {b}"),
    Binary("torch.cat([{a}, {b}], -1)", 1),
    Binary("torch.stack([{a}, {b}])", same=True),
)
"""Linear in both together, which may both be unreduced."""

OF_INDEX: tuple[str, ...] = (
    "{a} * (1 + {i})",
    "{a} + 0.1 * {i}",
    "torch.where({i} == 0, {a}, 0.5 * {a})",
    "{a}.index_select({d}, ({i} % {a}.shape[{d}]).reshape(1))",
    "{a}.roll(1, {d}) * {i}.to({a}.dtype)",
)
"""Functions of a tensor with at least one dim and of an index of the rank, which is an integer."""

COSTS = MappingProxyType({"elements": 96, "largest": 20.0})
"""The most elements of a value, and its largest number."""
