"""Views, and operators that change the memory layout of a value."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operator, Rejected


def _transpose(d: Draw) -> str:
    x = d.anything((2, 4))
    return f"{x}.transpose({d.dim(x)}, {d.dim(x)})"


def _permute(d: Draw) -> str:
    x = d.anything((2, 4))
    order = d.rng.sample(range(x.ndim), x.ndim)
    return d.choice(f"{x}.permute({order})", f"torch.permute({x}, {tuple(order)}).contiguous()")


def _matrix_transpose(d: Draw) -> str:
    return f"{d.floats((2, 4))}.mT"


def _t(d: Draw) -> str:
    return d.choice(f"{d.floats(2)}.t()", f"{d.floats(2)}.T")


def _adjoint(d: Draw) -> str:
    return f"{d.complexes((2, 3))}.mH"


def _movedim(d: Draw) -> str:
    x = d.anything((2, 4))
    return f"{x}.movedim({d.dim(x)}, {d.dim(x)})"


def _flatten(d: Draw) -> str:
    x = d.anything((1, 4))
    first = d.integer(0, x.ndim - 1)
    return f"{x}.flatten({first}, {d.integer(first, x.ndim - 1)})"


def _ravel(d: Draw) -> str:
    return f"{d.anything((1, 4))}.ravel()"


def _unflatten(d: Draw) -> str:
    x = d.anything((1, 3), nonempty=True)
    dim = d.dim(x)
    factor = d.choice(*[n for n in range(1, x.shape[dim] + 1) if x.shape[dim] % n == 0])
    return f"{x}.unflatten({dim}, ({factor}, -1))"


def _factors(d: Draw, numel: int) -> tuple[int, ...]:
    shape: list[int] = []
    while numel > 1 and len(shape) < 3:
        shape.append(d.choice(*[n for n in range(1, numel + 1) if numel % n == 0]))
        numel //= shape[-1]
    return (*shape, numel)


def _reshape(d: Draw) -> str:
    x = d.anything((1, 4), nonempty=True)
    shape = _factors(d, x.numel)
    return d.choice(f"{x}.reshape({shape})", f"torch.reshape({x}, {shape})", f"{x}.contiguous().view({shape})")


def _view(d: Draw) -> str:
    """A view of a value in its memory layout, which torch refuses if strides do not allow it."""
    x = d.anything((1, 4), nonempty=True, where=lambda t: t.is_contiguous())
    return f"({x} * 1).view({_factors(d, x.numel)})" if x.tensor.dtype.is_floating_point else f"{x}.view(-1)"


def _view_transposed(d: Draw) -> str:
    x = d.floats((2, 4), nonempty=True)
    return f"{x}.transpose(0, 1).contiguous().view(-1)"


def _squeeze(d: Draw) -> str:
    x = d.anything((0, 4))
    return d.choice(f"{x}.squeeze()", f"{x}[None].squeeze(0)", f"{x}.unsqueeze(-1).squeeze(-1)")


def _unsqueeze(d: Draw) -> str:
    x = d.anything((0, 3))
    return f"{x}.unsqueeze({d.integer(-x.ndim - 1, x.ndim)})"


def _expand(d: Draw) -> str:
    x = d.anything((0, 3))
    count = d.integer(1, 3)
    return d.choice(
        f"{x}.expand({count}, {', '.join(['-1'] * x.ndim)})".replace(", )", ")"),
        f"{x}.unsqueeze(-1).expand({', '.join(map(str, (*x.shape, count)))})",
    )


def _expand_as(d: Draw) -> str:
    x = d.floats((1, 4))
    y = d.broadcast(x)
    return f"{y}.expand_as({x})"


def _broadcast_to(d: Draw) -> str:
    x = d.floats((1, 3))
    return f"torch.broadcast_to({x}.sum(-1, keepdim=True), {x.shape})"


def _slice(d: Draw) -> str:
    x = d.anything((1, 4))
    dim = d.integer(0, x.ndim - 1)
    cut = d.choice("1:", ":-1", "::2", "1::2", "-3:", "1:2", ":3", "::3", "0:0" if d.maybe(0.1) else ":")
    return f"{x}[{':, ' * dim}{cut}]"


def _slice_several(d: Draw) -> str:
    x = d.anything((2, 4))
    return d.choice(
        f"{x}[1:, ..., ::2]", f"{x}[:, None, 1:]", f"{x}[..., 0, None]", f"{x}[-1, :2]", f"{x}[::2][:, ::2]"
    )


def _narrow(d: Draw) -> str:
    x = d.anything((1, 4), nonempty=True)
    dim = d.dim(x)
    start = d.integer(0, x.shape[dim] - 1)
    return f"{x}.narrow({dim}, {start}, {d.integer(1, x.shape[dim] - start)})"


def _select(d: Draw) -> str:
    x = d.anything((1, 4), nonempty=True)
    dim = d.dim(x)
    return f"{x}.select({dim}, {d.integer(-x.shape[dim], x.shape[dim] - 1)})"


def _getitem(d: Draw) -> str:
    x = d.anything((1, 4), nonempty=True)
    return f"{x}[{d.integer(-x.shape[0], x.shape[0] - 1)}]"


def _diagonal(d: Draw) -> str:
    x = d.floats((2, 4))
    first, second = d.rng.sample(range(x.ndim), 2)
    return f"{x}.diagonal({d.integer(-1, 1)}, {first}, {second})"


def _unfold(d: Draw) -> str:
    x = d.floats((1, 3), where=lambda t: max(t.shape) > 1, nonempty=True)
    dim = d.choice(*[n for n, size in enumerate(x.shape) if size > 1])
    size = d.integer(1, x.shape[dim])
    return f"{x}.unfold({dim}, {size}, {d.integer(1, 3)})"


def _as_strided(d: Draw) -> str:
    x = d.floats((1, 4), nonempty=True)
    shape = (d.integer(1, 3), d.integer(1, 3))
    strides = (d.integer(0, 4), d.integer(0, 3))
    offset = d.integer(0, 2)
    if offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) >= x.numel:
        raise Rejected("too few elements")
    made = d.choice(f"{x}.contiguous()", f"{x}.flip(0)", f"{x}.mT.contiguous()" if x.ndim > 1 else f"{x}.sin()")
    return f"{made}.as_strided({shape}, {strides}, {offset})"


def _as_strided_as_laid_out(d: Draw) -> str:
    """An `as_strided` whose strides depend on the memory layout of an intermediate value."""
    x = d.floats((2, 3), nonempty=True)
    return f"({x}.transpose(0, 1).contiguous().transpose(0, 1) * 2).as_strided(({x.numel},), (1,))"


def _contiguous(d: Draw) -> str:
    x = d.floats((1, 4))
    return d.choice(f"{x}.contiguous()", f"{x}.clone(memory_format=torch.contiguous_format)", f"{x}.clone()")


def _channels_last(d: Draw) -> str:
    x = d.floats(4)
    return d.choice(
        f"{x}.contiguous(memory_format=torch.channels_last)", f"{x}.to(memory_format=torch.channels_last) * 2"
    )


def _split(d: Draw) -> str:
    x = d.anything((1, 4), nonempty=True)
    dim = d.dim(x)
    size = x.shape[dim]
    return d.choice(
        f"{x}.chunk({d.integer(1, 3)}, {dim})",
        f"{x}.split({d.integer(1, size)}, {dim})",
        f"torch.split({x}, [1, {size - 1}], {dim})",
        f"{x}.tensor_split({d.integer(1, 3)}, {dim})",
        f"torch.tensor_split({x}, [{size // 2}], {dim})",
    )


def _unbind(d: Draw) -> str:
    x = d.anything((1, 4), where=lambda t: 0 < t.shape[0] < 4)
    return d.choice(f"{x}.unbind()", f"torch.unbind({x}, 0)")


def _hsplit(d: Draw) -> str:
    x = d.floats((2, 3), where=lambda t: t.shape[1] % 2 == 0 and t.numel() > 0)
    return f"torch.hsplit({x}, 2)"


def _swapaxes(d: Draw) -> str:
    return f"{d.floats((2, 4))}.swapaxes(0, -1)"


def _view_dtype(d: Draw) -> str:
    x = d.floats((1, 3), nonempty=True, where=lambda t: t.is_contiguous())
    return f"{x}.contiguous().view(torch.int64).view(torch.float64)"


OPERATORS: Mapping[str, Operator] = {
    "transpose": _transpose,
    "permute": _permute,
    "mT": _matrix_transpose,
    "t": _t,
    "mH": _adjoint,
    "movedim": _movedim,
    "swapaxes": _swapaxes,
    "flatten": _flatten,
    "ravel": _ravel,
    "unflatten": _unflatten,
    "reshape": _reshape,
    "view": _view,
    "view_transposed": _view_transposed,
    "view_dtype": _view_dtype,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "expand": _expand,
    "expand_as": _expand_as,
    "broadcast_to": _broadcast_to,
    "slice": _slice,
    "slice_several": _slice_several,
    "narrow": _narrow,
    "select": _select,
    "getitem": _getitem,
    "diagonal": _diagonal,
    "unfold": _unfold,
    "as_strided": _as_strided,
    "as_strided_as_laid_out": _as_strided_as_laid_out,
    "contiguous": _contiguous,
    "channels_last": _channels_last,
    "split": _split,
    "unbind": _unbind,
    "hsplit": _hsplit,
}
