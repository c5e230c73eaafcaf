"""Operators that join, repeat, pad and move elements."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operator, Rejected, along
from proofs.fuzz.tensors import Kind


def _cat(d: Draw) -> str:
    x = d.floats((1, 4))
    y = d.like(x)
    dim = d.dim(x)
    cut = f"{x}.narrow({dim}, 0, {x.shape[dim] // 2})"
    return d.choice(
        f"torch.cat([{x}, {y}], {dim})", f"torch.cat([{x}, {y}, {cut}], {dim})", f"torch.cat(({cut}, {y}), {dim})"
    )


def _cat_mixed(d: Draw) -> str:
    x = d.tensor((Kind.INT, Kind.BOOL, Kind.COMPLEX), (1, 3))
    y = d.like(x, d.choice(Kind.FLOAT, Kind.of(x.tensor) or Kind.FLOAT))
    return f"torch.cat([{x}, {y}], {d.dim(x)})"


def _stack(d: Draw) -> str:
    x = d.anything((0, 3))
    y = d.like(x, Kind.of(x.tensor) or Kind.FLOAT)
    return f"torch.stack([{x}, {y}], {d.integer(-x.ndim - 1, x.ndim)})"


def _named_stack(d: Draw) -> str:
    x = d.floats((1, 3))
    y = d.like(x)
    return f"torch.{d.choice('hstack', 'vstack', 'dstack', 'column_stack')}([{x}, {y}])"


def _pad(d: Draw) -> str:
    x = d.floats((1, 4))
    pads = [d.integer(0, 2) for _ in range(2 * d.integer(1, x.ndim))]
    return f"F.pad({x}, {pads}, value={d.number()})"


def _pad_negative(d: Draw) -> str:
    x = d.floats((1, 3), where=lambda t: t.shape[-1] > 1)
    return f"F.pad({x}, (-1, {d.integer(0, 2)}))"


def _pad_mode(d: Draw) -> str:
    ndim = d.choice(2, 3, 3, 4)
    x = d.floats(
        ndim, where=lambda t: all(size > 1 for size in t.shape), make=lambda: [d.integer(2, 4) for _ in range(ndim)]
    )
    mode = d.choice("reflect", "replicate", "circular")
    pads = (1, d.integer(0, 1)) if ndim < 4 else (1, 0, d.integer(0, 1), 1)
    return f"F.pad({x}, {pads}, mode='{mode}')"


def _repeat(d: Draw) -> str:
    x = d.anything((0, 3))
    counts = [d.integer(1, 2) for _ in range(x.ndim + d.integer(0, 1))]
    if not counts:
        raise Rejected("no dim")
    return d.choice(f"{x}.repeat({', '.join(map(str, counts))})", f"torch.tile({x}, {tuple(counts)})")


def _repeat_interleave(d: Draw) -> str:
    x = d.anything((1, 3))
    return d.choice(f"{x}.repeat_interleave(2, {d.dim(x)})", f"torch.repeat_interleave({x}, 2)")


def _roll(d: Draw) -> str:
    x = d.anything((1, 4))
    return d.choice(f"{x}.roll({d.integer(-2, 3)}, {d.dim(x)})", f"torch.roll({x}, 2)", f"{x}.roll((1, -1), (0, -1))")


def _flip(d: Draw) -> str:
    x = d.anything((1, 4))
    return f"{x}.flip({d.dims(x)})"


def _rot90(d: Draw) -> str:
    x = d.floats((2, 3))
    return f"torch.rot90({x}, {d.integer(1, 3)}, (0, 1))"


def _triangle(d: Draw) -> str:
    x = d.floats((2, 4))
    return f"{x}.{d.choice('tril', 'triu')}({d.integer(-1, 1)})"


def _diag_embed(d: Draw) -> str:
    x = d.floats((1, 3))
    return f"torch.diag_embed({x}, {d.integer(-1, 1)})"


def _diag(d: Draw) -> str:
    return f"torch.diag({d.floats((1, 2))}, {d.integer(-1, 1)})"


def _block_diag(d: Draw) -> str:
    return f"torch.block_diag({d.floats(2)}, {d.floats((1, 2))})"


def _meshgrid(d: Draw) -> str:
    return f"torch.meshgrid({d.floats(1)}, {d.floats(1)}, indexing='{d.choice('ij', 'xy')}')"


def _atleast(d: Draw) -> str:
    return f"torch.atleast_{d.choice(1, 2, 3)}d({d.floats((0, 3))})"


def _broadcast_tensors(d: Draw) -> str:
    x = d.floats((1, 3))
    y = d.broadcast(x)
    return f"torch.broadcast_tensors({x}, {y})"


def _pixel_shuffle(d: Draw) -> str:
    x = d.floats(
        4,
        where=lambda t: t.shape[1] % 4 == 0 and t.numel() > 0,
        make=lambda: (d.integer(1, 3), 4, d.integer(1, 3), d.integer(1, 3)),
    )
    return f"F.pixel_shuffle({x}, 2)"


def _pixel_unshuffle(d: Draw) -> str:
    x = d.floats(
        4,
        where=lambda t: t.shape[2] % 2 == 0 and t.shape[3] % 2 == 0 and t.numel() > 0,
        make=lambda: (d.integer(1, 3), d.integer(1, 2), 2, 4),
    )
    return f"F.pixel_unshuffle({x}, 2)"


def _channel_shuffle(d: Draw) -> str:
    x = d.floats(
        4, where=lambda t: t.shape[1] % 2 == 0 and t.numel() > 0, make=lambda: (d.integer(1, 3), 4, 2, d.integer(1, 3))
    )
    return f"F.channel_shuffle({x}, 2)"


def _im2col(d: Draw) -> str:
    x = d.floats(
        4,
        where=lambda t: min(t.shape) > 0 and min(t.shape[2:]) > 1,
        make=lambda: (d.integer(1, 3), d.integer(1, 3), 3, d.integer(2, 4)),
    )
    return f"F.unfold({x}, 2, padding={d.integer(0, 1)}, stride={d.integer(1, 2)})"


def _col2im(d: Draw) -> str:
    x = d.sized((None, 8, 6))
    return f"F.fold({x}, (3, 4), 2)"


def _loop(d: Draw) -> str:
    x = d.floats((1, 3), nonempty=True)
    return f"torch.stack([row.sin() * number for number, row in enumerate({x})])"


def _factory(d: Draw) -> str:
    x = d.floats((1, 3), nonempty=True)
    size = x.shape[-1]
    return d.choice(
        f"{x} + torch.arange({size})",
        f"{x} * torch.linspace(0, 1, {size})",
        f"{x} - torch.ones({size})",
        f"torch.eye({size}) * {x}.select(0, 0).sum()",
        f"torch.zeros({x}.shape, dtype=torch.float64) - {x}",
        f"{x} * torch.tensor({[0.5 * n - 1 for n in range(size)]})",
        f"{x} + torch.full((), 2.5)",
        f"{x} * torch.tril(torch.ones({size}, {size}))[0]",
    )


def _vander(d: Draw) -> str:
    return f"torch.vander({d.floats(1)}.tanh(), 3)"


def _cartesian_prod(d: Draw) -> str:
    return f"torch.cartesian_prod({d.floats(1)}, {d.floats(1)})"


def _interpolate(d: Draw) -> str:
    mode, ndim = d.choice(
        ("nearest", 4),
        ("bilinear", 4),
        ("bicubic", 4),
        ("linear", 3),
        ("nearest", 3),
        ("nearest-exact", 4),
        ("area", 3),
    )
    x = d.floats(ndim, nonempty=True)
    size = d.choice("scale_factor=2", f"size={tuple(d.integer(1, 5) for _ in range(ndim - 2))}")
    corners = f", align_corners={d.maybe()}" if mode in ("bilinear", "bicubic", "linear") else ""
    return f"F.interpolate({x}, {size}, mode='{mode}'{corners})"


def _grid_sample(d: Draw) -> str:
    x = d.floats(4, nonempty=True)
    grid = d.sized((x.shape[0], None, None, 2))
    mode = d.choice("bilinear", "nearest")
    return f"F.grid_sample({x}, {grid}.tanh() * 0.9, mode='{mode}', align_corners={d.maybe()})"


OPERATORS: Mapping[str, Operator] = {
    "cat": _cat,
    "cat_mixed": _cat_mixed,
    "stack": _stack,
    "hstack": _named_stack,
    "pad": _pad,
    "pad_negative": _pad_negative,
    "pad_mode": _pad_mode,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "roll": _roll,
    "flip": _flip,
    "rot90": _rot90,
    "triangle": _triangle,
    "diag_embed": _diag_embed,
    "diag": _diag,
    "block_diag": _block_diag,
    "meshgrid": _meshgrid,
    "atleast": _atleast,
    "broadcast_tensors": _broadcast_tensors,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "channel_shuffle": _channel_shuffle,
    "im2col": _im2col,
    "col2im": _col2im,
    "loop": _loop,
    "factory": _factory,
    "vander": _vander,
    "cartesian_prod": _cartesian_prod,
    "interpolate": _interpolate,
    "grid_sample": _grid_sample,
    "gradient": along("torch.gradient({x}, dim={d})[0] if {x}.shape[{d}] > 1 else {x} * 3"),
}
