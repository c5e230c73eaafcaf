"""Torch's random operators by a key: what stands for each in a program with `rng="counter"`.

An element depends on the key and its index in the unsharded result, whatever the strides of memory. The formulas are
torch's; integers of a range are remainders, as torch's are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from spmd.errors import TraceError
from spmd.ir.operator_kinds import is_composite
from spmd.random.generators.draw import DERIVE_KEY, DRAW, contiguous_strides
from spmd.tracing.draw_scopes import IMPL, DrawScope
from spmd.tracing.source import where

OpOverload = torch._ops.OpOverload

_LAYOUTS = ("generator", "layout", "pin_memory", "memory_format")
"""Arguments that say nothing of the numbers."""

_ENDS = {"from": "low", "to": "high"}
"""What functions here call the arguments that are words of Python."""


def drawn(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], scope: DrawScope) -> Any:
    """The results of a random operator by the next key of a scope.

    Args:
        func: the operator; it may write in place, or to `out`.
        args, kwargs: its arguments.
        scope: the scope.

    Returns:
        The results; NotImplemented of an operator that calls others, which draw.

    Raises:
        TraceError: an operator that no key draws for, or one with a generator of its own.
    """
    name, schema = func._schema.name.removeprefix("aten::"), func._schema
    given = {argument.name: argument.default_value for argument in schema.arguments if argument.name != "dtype"}
    given |= {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    draw = _DRAWS.get(name.removesuffix("_"))
    if draw is None and (is_composite(func) or not any(str(result.type) == "Tensor" for result in schema.returns)):
        return NotImplemented
    if given.get("generator") is not None:
        raise TraceError(
            f"{func} at {where()} draws from a torch.Generator of its own, whose state a program does not have. Leave "
            "generator= out and call torch.manual_seed before the jitted function, or draw by a key: "
            "spmd.random.key(seed)."
        )
    if draw is None or isinstance(given.get("high"), Tensor):
        raise TraceError(
            f'{func} at {where()} has no form by a key, by which rng="counter" draws. Draw with spmd.random, or take '
            'the numbers of one device\'s generator, which each rank draws whole: spmd.jit(..., rng="torch").'
        )
    target = given.pop("out", given.get("self") if name.endswith("_") else None)
    options = {_ENDS.get(key, key): value for key, value in given.items() if key not in _LAYOUTS}
    result = draw(_Draw(scope.next_key()), **options)
    return result if target is None else target.copy_(result)


@attrs.frozen
class _Draw:
    """Draws by one key.

    Args:
        key: the key, i64[2].
        box: of draws of a box of a larger tensor, that tensor's strides, and the index of the first element, i64[].
    """

    key: Tensor
    box: tuple[Sequence[int], Tensor] | tuple[()] = ()

    def __call__(
        self, kind: str, size: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """Elements of a kind, on the device of the key if no other is given."""
        key = self.key if device is None else self.key.to(device)
        return DRAW(key, list(size), kind, dtype, IMPL, *self.box)  # type: ignore[no-any-return]

    def like(self, kind: str, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Elements with the shape, device, and if no other is given dtype of a tensor."""
        return self(kind, x.shape, dtype or x.dtype, x.device)

    def part(self, number: int) -> _Draw:
        """Draws by one of the keys that are made of this one."""
        data = torch.full((), number, dtype=torch.int64, device=self.key.device)
        return attrs.evolve(self, key=DERIVE_KEY(self.key, data, IMPL))


def drawn_box(
    name: Literal["rand", "randn"], key: Tensor, shape: Sequence[int], slices: Sequence[slice], dtype: torch.dtype
) -> Tensor:
    """A box of what `torch.rand` or `torch.randn` draws as the first in a program with a seed's key.

    Args:
        name: the function.
        key: the key of the seed, i64[2].
        shape: the shape of the whole.
        slices: the box.
        dtype: the dtype.
    """
    strides = contiguous_strides(shape)
    start = sum(part.start * stride for part, stride in zip(slices, strides, strict=True))
    box = strides, torch.full((), start, dtype=torch.int64, device=key.device)
    draw, size = _Draw(DrawScope(key).next_key(), box), [part.stop - part.start for part in slices]
    return _DRAWS[name](draw, size, dtype, key.device)  # type: ignore[no-any-return]


def _floats(
    draw: _Draw, kind: str, size: Sequence[int], dtype: torch.dtype | None, device: Any, scale: float = 1.0
) -> Tensor:
    """Floats of a kind, or complex numbers of them."""
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_complex:
        return draw(kind, size, dtype, device)
    real = torch.float64 if dtype is torch.complex128 else torch.float32
    parts = (draw.part(number)(kind, size, real, device) * scale for number in range(2))
    return torch.complex(*parts).to(dtype)


def _rand(draw: _Draw, size: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return _floats(draw, "uniform", size, dtype, device)


def _randn(draw: _Draw, size: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return _floats(draw, "normal", size, dtype, device, math.sqrt(0.5))


def _like(made: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operator that takes shape, dtype and device of a tensor, of one that takes them."""

    def draw_like(draw: _Draw, self: Tensor, dtype: Any = None, device: Any = None, **given: Any) -> Tensor:
        return made(draw, size=self.shape, dtype=dtype or self.dtype, device=device or self.device, **given)

    return draw_like


def _integers(
    draw: _Draw, size: Sequence[int], low: int, high: int, dtype: torch.dtype | None = None, device: Any = None
) -> Tensor:
    """Integers from `low` to below `high`, as remainders of 32 random bits, or of 63 where the range is longer."""
    count = high - low
    if count <= 0:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    if count < 2**32:
        bits = draw("bits", size, torch.int32, device).to(torch.int64) & 0xFFFFFFFF
    else:
        bits = draw("bits", size, torch.int64, device)
        if count == 2**64:
            return bits.to(dtype or torch.int64)
        bits = bits & (2**63 - 1)
    return (bits % min(count, 2**63 - 1) + low).to(dtype or torch.int64)


def _randint(draw: _Draw, high: int, low: int = 0, **given: Any) -> Tensor:
    return _integers(draw, low=low, high=high, **given)


def _random(draw: _Draw, self: Tensor, low: int = 0, high: int | None = None) -> Tensor:
    """`random_`, by default up to the largest number before which a dtype has all integers."""
    if high is None:
        floating = self.dtype.is_floating_point
        high = round(2 / torch.finfo(self.dtype).eps) if floating else 1
        high += 0 if floating or self.dtype is torch.bool else torch.iinfo(self.dtype).max
        high += self.dtype is torch.bool or floating
    return _integers(draw, self.shape, low, high, self.dtype, self.device)


def _randperm(draw: _Draw, n: int, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """The order of random words: two of 64 bits are hardly ever equal."""
    return draw("bits", (n,), torch.int64, device).argsort(stable=True).to(dtype or torch.int64)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which formulas of a dtype's numbers are computed."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _uniform(draw: _Draw, self: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return draw.like("uniform", self) * (high - low) + low


def _normal(draw: _Draw, self: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    found = _randn(draw, self.shape, self.dtype, self.device)
    return found if (mean, std) == (0, 1) else found * std + mean


def _normal_of(draw: _Draw, mean: Any, std: Any, size: Any = None, dtype: Any = None, device: Any = None) -> Tensor:
    """`torch.normal`, of numbers or tensors."""
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    if tensors:
        like = torch.broadcast_tensors(*tensors)[0]
        size, dtype, device = like.shape, like.dtype, like.device
    return _randn(draw, size, dtype, device) * std + mean


def _log_normal(draw: _Draw, self: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return (draw.like("normal", self, _computed_in(self.dtype)) * std + mean).exp().to(self.dtype)


def _positive(draw: _Draw, like: Tensor) -> Tensor:
    """Floats of the standard exponential distribution that are not zero, of which users take logarithms."""
    dtype = _computed_in(like.dtype)
    return draw.like("exponential", like, dtype).clamp(min=torch.finfo(dtype).tiny)


def _exponential(draw: _Draw, self: Tensor, lambd: float = 1.0) -> Tensor:
    found = _positive(draw, self)
    return (found if lambd == 1 else found / lambd).to(self.dtype)


def _cauchy(draw: _Draw, self: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    fractions = draw.like("uniform", self, _computed_in(self.dtype))
    return ((fractions - 0.5).mul(math.pi).tan() * sigma + median).to(self.dtype)


def _geometric(draw: _Draw, self: Tensor, p: float) -> Tensor:
    if p == 1:
        return torch.ones_like(self)
    return (draw.like("exponential", self, torch.float64) / -math.log1p(-p)).ceil().clamp(min=1).to(self.dtype)


def _standard_gamma(draw: _Draw, self: Tensor) -> Tensor:
    """Marsaglia and Tsang's method, by which a candidate is accepted with a probability of 95% at least.

    Of candidates that do not end, as theirs, 12 are drawn: all are rejected once in 10^15 draws, and the first counts.
    """
    dtype = _computed_in(self.dtype)
    alpha, size = self.to(dtype), (12, *self.shape)
    shape = torch.where(alpha < 1, alpha + 1, alpha) - 1 / 3
    x = draw.part(0)("normal", size, dtype, self.device)
    candidates = (1 + x * (shape * 9).rsqrt()).pow(3)
    bound = x.square() / 2 + shape * (1 - candidates + candidates.log())  # NaN where a candidate is negative
    accepted = draw.part(1)("exponential", size, dtype, self.device) > -bound
    found = candidates.gather(0, accepted.to(torch.int8).argmax(0, keepdim=True)).squeeze(0) * shape
    below_one = (-draw.part(2).like("exponential", self, dtype) / alpha).exp()
    found = torch.where(alpha < 1, found * below_one, found)
    return found.clamp(min=torch.finfo(dtype).tiny).to(self.dtype)


def _dirichlet(draw: _Draw, self: Tensor) -> Tensor:
    found = _standard_gamma(draw, self)
    return (found / found.sum(-1, keepdim=True)).clamp(min=torch.finfo(found.dtype).tiny)


def _hits(draw: _Draw, like: Tensor, p: float) -> Tensor:
    """Booleans that are true with a probability, a multiple of 2^-32; one of 2^-16 takes half as many bits."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    if p in (0, 1):
        return torch.full_like(like, bool(p), dtype=torch.bool)
    dtype, levels = (torch.int16, 2**16) if (p * 2**16).is_integer() else (torch.int32, 2**32)
    level = min(round(p * levels), levels - 1)
    return draw.like("bits", like, dtype) < level - levels // 2


def _bernoulli(draw: _Draw, self: Tensor, p: float | Tensor | None = None) -> Tensor:
    """With one probability, those of a tensor, or those of the operand."""
    if p is not None and not isinstance(p, Tensor):
        return _hits(draw, self, float(p)).to(self.dtype)
    p = self if p is None else p
    return (draw.like("uniform", self, _computed_in(p.dtype)) < p).to(self.dtype)


def _native_dropout(draw: _Draw, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    keep = _hits(draw, input, 1 - p)
    return input * keep * (0.0 if p == 1 else 1 / (1 - p)), keep


def _fused_dropout(draw: _Draw, self: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """As `native_dropout`, by the probability that an element stays."""
    keep = _hits(draw, self, p)
    return self * keep * (1 / p), keep.to(torch.uint8)


def _rrelu_with_noise(
    draw: _Draw, self: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor:
    slopes = draw.like("uniform", self) * (upper - lower) + lower
    return self * noise.copy_(torch.where(self <= 0, slopes, 1))


def _multinomial(draw: _Draw, self: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """The first events of processes with the given rates; several with replacement, by the sums of probabilities."""
    weights = self.to(_computed_in(self.dtype))
    if not replacement and num_samples > self.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    if num_samples == 1:
        return (weights / _positive(draw, weights)).argmax(-1, keepdim=True)
    if not replacement:
        return (weights / _positive(draw, weights)).topk(num_samples).indices
    sums = weights.cumsum(-1)
    total = sums.narrow(-1, self.shape[-1] - 1, 1)
    size = (*self.shape[:-1], num_samples)
    wanted = torch.minimum(draw("uniform", size, sums.dtype, sums.device) * total, total * (1 - 2.0**-22))
    return torch.searchsorted(sums, wanted, right=True)


_DRAWS: Mapping[str, Callable[..., Any]] = {
    "rand": _rand, "randn": _randn, "randint": _randint, "randperm": _randperm,
    "rand_like": _like(_rand), "randn_like": _like(_randn), "randint_like": _like(_randint),
    "uniform": _uniform, "normal_functional": _normal, "log_normal": _log_normal, "exponential": _exponential,
    "cauchy": _cauchy, "geometric": _geometric, "random": _random, "bernoulli": _bernoulli,
    "native_dropout": _native_dropout, "_fused_dropout": _fused_dropout, "rrelu_with_noise": _rrelu_with_noise,
    "multinomial": _multinomial, "_standard_gamma": _standard_gamma, "_sample_dirichlet": _dirichlet,
    "normal": lambda draw, self=None, mean=0.0, std=1.0, **given: (
        _normal_of(draw, mean, std, **given) if self is None else _normal(draw, self, mean, std)
    ),
}  # fmt: skip
"""What draws for an operator, by its name without the underscore of those that write in place."""
