"""The operators of random programs: total functions, defined for tensors of any shape.

Each takes two tensors (0-d and empty ones too) and a number, and returns tensors. If the shapes do not suit the torch
operator, it changes them, or returns its first operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from spmd.api.jit import jit
from spmd.core.mesh import Mesh
from spmd.core.spec import P
from spmd.tracing.constrain import constrain, reshard

Operator: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int], Any]
"""`operator(x, y, number)` returns a tensor or a sequence of tensors; `number` chooses a variant."""

_WIDEST = 512  # elements of the largest operand that is repeated


def real(x: torch.Tensor) -> torch.Tensor:
    """`x` if it is floating-point, else `x` as float64."""
    return x if x.is_floating_point() else x.double()


def whole(x: torch.Tensor, count: int) -> torch.Tensor:
    """An int64 tensor of indices below `count`, with the shape of `x`; from the values of `x` if those are integers."""
    if x.is_floating_point():
        return torch.arange(x.numel()).view(x.shape) % count
    return x.long() % count


def matching(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`y`, summed over the dims that keep it from broadcasting to the shape of `x`."""
    y = y.sum(tuple(range(y.ndim - x.ndim))) if y.ndim > x.ndim else y
    wrong = [d for d in range(-y.ndim, 0) if y.shape[d] not in (1, x.shape[d])]
    return y.sum(wrong, keepdim=True).to(y.dtype) if wrong else y


def weights(rows: int, columns: int, number: int) -> torch.Tensor:
    """A constant float64 matrix, for a function to close over."""
    return torch.linspace(-1.0, 1.0 + number, rows * columns, dtype=torch.float64).view(rows, columns).cos()


def dim_of(x: torch.Tensor, number: int) -> int:
    """A dim of `x`, non-negative or negative; `x` must not be 0-d."""
    return number % (2 * x.ndim) - x.ndim


def _elementwise(function: Callable[[torch.Tensor], torch.Tensor]) -> Operator:
    return lambda x, y, number: function(real(x))


def _binary(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operator:
    return lambda x, y, number: function(real(x), matching(real(y), x))


def _along(function: Callable[[torch.Tensor, int], Any], *, empty: bool = True) -> Operator:
    """The operator for a function of a tensor and a dim; `empty` says whether that dim may have length 0."""

    def operator(x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
        if not x.ndim or not (empty or x.shape[dim_of(x, number)]):
            return x
        return function(real(x), dim_of(x, number))

    return operator


def _reduce(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    dims = tuple(d for d in range(x.ndim) if number >> d & 1)
    if not dims or not x.numel():
        return real(x).sum(dims)
    functions = (torch.sum, torch.mean, _variance, torch.logsumexp, torch.linalg.vector_norm)
    return functions[number % 5](real(x), dim=dims, keepdim=bool(number & 16))


def _variance(x: torch.Tensor, dim: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    return torch.var(x, dim, correction=0, keepdim=keepdim)


def _linear(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if not x.ndim:
        return x
    features = number % 5 + 1
    bias = torch.linspace(0, 1, features, dtype=torch.float64) if number & 8 else None
    return F.linear(real(x), weights(features, x.shape[-1], number) / (x.shape[-1] + 1), bias)


def _matmul(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if x.ndim < 2:
        return real(x) * 2
    y = matching(real(y), x).expand(x.shape)
    return real(x) @ y.mT / (1 + x.shape[-1]) if number & 1 else x.to(y.dtype).mT @ y / (1 + x.shape[-2])


def _einsum(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if x.ndim != 3:
        return x
    pattern = ("abc,abd->acd", "abc,dbc->ad", "abc,abc->b", "abc,adc->abd")[number % 4]
    return torch.einsum(pattern, real(x), matching(real(y), x).expand(x.shape)) / 4


def _unflatten(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if not x.ndim or not x.shape[dim_of(x, number)] or x.ndim > 4:
        return x.unsqueeze(0) if x.ndim < 4 else x
    size = x.shape[dim_of(x, number)]
    factors = [factor for factor in range(1, size + 1) if size % factor == 0]
    return x.unflatten(dim_of(x, number), (factors[number % len(factors)], -1))


def _flatten(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    start = number % max(x.ndim, 1)
    return x.flatten(start, -1 if number & 8 else min(start + 1, max(x.ndim - 1, 0)))


def _permute(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    order = list(range(x.ndim))
    return x.permute([*order[number % max(x.ndim, 1) :], *order[: number % max(x.ndim, 1)]])


def _slice(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if not x.ndim:
        return x[None]
    cut = (slice(1, None), slice(None, -1), slice(None, None, 2), slice(1, 2), slice(0, 0), slice(-3, None))
    return x.movedim(dim_of(x, number), 0)[cut[number % len(cut)]]


def _split(x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    if not x.ndim:
        return x
    return x.chunk(2, dim_of(x, number)) if number & 1 else x.split(2, dim_of(x, number))[:3]


def _unbind(x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    found = x.unbind(dim_of(x, number))[:2] if x.ndim else ()
    return found or x


def _join(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    y = matching(real(y), x).expand(x.shape)
    if not x.ndim or number & 1:
        return torch.stack([real(x), y], number % (x.ndim + 1))
    dim = dim_of(x, number)
    return torch.cat([real(x), y, real(x).narrow(dim, 0, x.shape[dim] // 2)], dim)


def _pick(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if not x.ndim or not x.shape[0]:
        return x
    index = whole(y.flatten()[:4], x.shape[0])
    if number % 3 == 0:
        return x[index]
    if number % 3 == 1:
        return x.index_select(0, index)
    return x.gather(0, whole(matching(y, x).expand(x.shape), x.shape[0]))


def _put(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if not x.ndim or not x.shape[0]:
        return x
    index = torch.arange(0, x.shape[0], 2)
    source = matching(real(y), x).expand(x.shape)[: len(index)]
    if number & 1:
        return real(x).index_add(0, index, source)
    return real(x).slice_scatter(source[:1], 0, x.shape[0] - 1)


def _embedding(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    table = real(y) if y.ndim == 2 and y.numel() else weights(7, 3, number)
    return F.embedding(whole(x, len(table)), table) if x.ndim < 4 else x


def _cross_entropy(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if x.ndim != 2 or not x.numel():
        return real(x).log_softmax(-1) if x.ndim else x
    target = whole(y.flatten().sum() + torch.arange(x.shape[0]), x.shape[1])
    reduction = ("mean", "sum", "none")[number % 3]
    ignored = -100 if number & 4 else 0
    return F.cross_entropy(real(x), target, reduction=reduction, ignore_index=ignored)


def _layer_norm(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if not x.ndim or not x.numel():
        return x
    shape = x.shape[-1 - number % x.ndim :]
    scale = matching(real(y), x[(0,) * (x.ndim - len(shape))]).expand(shape) if number & 8 else None
    return F.layer_norm(real(x) + weights(1, x.numel(), number).view(x.shape), shape, scale)


def _attention(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if x.ndim != 4 or not x.numel():
        return x
    return F.scaled_dot_product_attention(real(x), real(x) * 0.5, matching(real(y), x).expand(x.shape), is_causal=True)


def _write(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    """In-place operators on intermediate values and on views of them."""
    made = real(x) * 1.5
    made.add_(matching(real(y), x))
    if made.ndim:
        made[..., :1] *= 2
        made.narrow(0, 0, made.shape[0] // 2).zero_()
    return made.clamp_(-4.1, 4.1)


def _mask(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    mask = matching(real(y), x) > 0.3
    return (x.masked_fill(mask, number), torch.where(mask, real(x), 0.5), mask & (real(x) < 1.3))[number % 3]


def _compare(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    above = real(x) > matching(real(y), x) + 0.3
    if not x.ndim or number & 1:
        return (above, above.any(), above.all(), ~above, above.sum())[number // 2 % 5]
    return above.long().cumsum(dim_of(x, number))


def _shift(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if not x.ndim:
        return x
    dim = dim_of(x, number)
    padded = F.pad(x, (1, 0)) if x.ndim < 4 and number & 16 else x
    return (padded.flip(dim), padded.roll(number - 2, dim), padded.diff(dim=dim) if x.dtype.is_floating_point else x)[
        number % 3
    ]


def _repeat(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if x.numel() > _WIDEST or x.ndim > 3:
        return x
    if number & 1:
        return x.expand(2, *x.shape)
    return x.repeat_interleave(2, dim_of(x, number)) if x.ndim and number & 2 else x.repeat(2, *[1] * x.ndim)


def _triangle(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if x.ndim < 2:
        return x
    return (x.tril(number - 2), x.triu(), x.diagonal(dim1=-2, dim2=-1))[number % 3]


def _order(x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    if not x.ndim or not x.shape[dim_of(x, number)]:
        return x
    x, dim = real(x), dim_of(x, number)
    if number % 4 == 0:
        return x.argmax(dim)
    if number % 4 == 1:
        return tuple(x.max(dim))
    return x.sort(dim).values if number % 4 == 2 else x.topk(1, dim).values


def _cast(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    if x.is_floating_point():
        return x.detach() > 0.3 if number & 1 else x * 1
    return (x.double(), x.bool(), x.long() * 2)[number % 3]


def _over(xs: torch.Tensor, transform: Callable[[torch.Tensor], Any]) -> Any:
    return torch.func.vmap(transform)(xs) if xs.ndim and xs.shape[0] else transform(xs)


def _inner(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.flatten().sum().cos()).sum()


def _vmap(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return _over(real(x), lambda row: row - row.flatten().mean() if row.numel() else row)


def _per_row_gradient(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return _over(real(x), torch.func.grad(_inner))


def _jvp(x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    x = real(x).contiguous()  # torch's jvp writes to both, so neither may be expanded
    return torch.func.jvp(lambda v: v.sin() * v, (x,), (matching(real(y), x).expand(x.shape).contiguous(),))


def _vjp(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    found: Any = torch.func.vjp(torch.tanh, real(x))
    value, pull = found
    return pull(matching(real(y), x).expand(value.shape))[0]  # type: ignore[no-any-return]


def _power(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return (real(x) / (1 + real(x).detach().square().sum().sqrt())) ** (number % 4)


OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "sin": _elementwise(torch.sin),
        "gelu": _elementwise(F.gelu),
        "relu": _elementwise(lambda x: F.relu(x - 0.37)),
        "sigmoid": _elementwise(torch.sigmoid),
        "exp": _elementwise(lambda x: x.tanh().exp()),
        "affine": _elementwise(lambda x: 2 * x - 1),
        "abs": _elementwise(lambda x: (x + 0.41).abs()),
        "power": _power,
        "add": _binary(torch.add),
        "sub": _binary(torch.sub),
        "mul": _binary(lambda x, y: x * y / 2),
        "div": _binary(lambda x, y: x / (1 + y.square())),
        "maximum": _binary(lambda x, y: torch.maximum(x, y + 0.23)),
        "reduce": _reduce,
        "amax": _along(lambda x, dim: x.amax(dim, keepdim=True), empty=False),
        "prod": _along(lambda x, dim: x.tanh().prod(dim)),
        "cumsum": _along(lambda x, dim: x.cumsum(dim)),
        "softmax": _along(lambda x, dim: x.softmax(dim)),
        "log_softmax": _along(lambda x, dim: x.log_softmax(dim)),
        "layer_norm": _layer_norm,
        "linear": _linear,
        "matmul": _matmul,
        "einsum": _einsum,
        "attention": _attention,
        "embedding": _embedding,
        "cross_entropy": _cross_entropy,
        "flatten": _flatten,
        "unflatten": _unflatten,
        "permute": _permute,
        "squeeze": lambda x, y, number: x.squeeze(),
        "reshape": lambda x, y, number: x.mT.reshape(-1) if x.ndim > 1 else x.reshape(1, -1),
        "slice": _slice,
        "split": _split,
        "unbind": _unbind,
        "join": _join,
        "pick": _pick,
        "put": _put,
        "write": _write,
        "mask": _mask,
        "compare": _compare,
        "shift": _shift,
        "repeat": _repeat,
        "triangle": _triangle,
        "order": _order,
        "cast": _cast,
        "vmap": _vmap,
        "per_row_gradient": _per_row_gradient,
        "jvp": _jvp,
        "vjp": _vjp,
    }
)
"""The operators of a random program that do not depend on a mesh, by name."""


def _spec_for(x: torch.Tensor, number: int, mesh: Mesh) -> P:
    """A spec for `x` from a number, whose digits choose the dim of every mesh axis, or none."""
    dims: list[list[str]] = [[] for _ in range(x.ndim)]
    order: Sequence[str] = mesh.names if number & 1 else mesh.names[::-1]
    for axis in order:
        number, choice = divmod(number, x.ndim + 1)
        if choice < x.ndim:
            dims[choice].append(axis)
    return P(*dims)


def sharding_operators(mesh: Mesh | None) -> Mapping[str, Operator]:
    """The operators that constrain the sharding of a value, by name; without a mesh, the same without constraints."""
    if mesh is None:
        return dict.fromkeys(SHARDING, lambda x, y, number: x * 2 if number & 1 else x)
    return {
        "constrain": lambda x, y, number: constrain(x * 2 if number & 1 else x, _spec_for(x, number, mesh)),
        "reshard": lambda x, y, number: reshard(x * 2 if number & 1 else x, _spec_for(x, number, mesh)),
        "nested": lambda x, y, number: jit(
            lambda v: v * 2 if number & 1 else v, _spec_for(x, number, mesh), P(), mesh=mesh
        )(x),
    }


SHARDING = ("constrain", "reshard", "nested")
"""The names of the operators of `sharding_operators`."""
