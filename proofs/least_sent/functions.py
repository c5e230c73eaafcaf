"""Functions of a few operators each, and what one of 8 ranks must send for each: closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from proofs.least_sent.figures import COLUMNS, ROWS, Example
from spmd import P

ROW = 4 * COLUMNS
"""The bytes of a row of f32[ROWS, COLUMNS]."""
SHARD = ROWS * ROW // 8
IMAGES = (8, 64, 512, 512)
LINE = 4 * 8 * 64 * 512
"""The bytes of one line of all channels of all IMAGES."""
MERGE = 2 * 7 / 8
"""What a rank sends, by a ring, for each byte that 8 ranks merge."""


def _heat(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[1:-1] = x[1:-1] + 0.1 * (x[2:] - 2 * x[1:-1] + x[:-2])
    return y


def _heat_by_convolution(x: torch.Tensor) -> torch.Tensor:
    stencil = torch.tensor([[0, 0.1, 0], [0.1, 0.6, 0.1], [0, 0.1, 0]])
    return F.conv2d(F.pad(x[None, None], (1, 1, 1, 1)), stencil[None, None])[0, 0]


def _convolved(x: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, torch.ones(64, 64, 3, 3), padding=1)


def _clipped(x: torch.Tensor) -> torch.Tensor:
    return x * (1 / (torch.nn.utils.get_total_norm([x]) + 1e-6)).clamp(max=1)


def _lamb(w: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    update = m / (v.sqrt() + 1e-6) + 0.01 * w
    return w - 1e-3 * (w.norm() / update.norm()) * update


def _pooled(pool: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: pool(x.T[None], 3, 2, 1)[0].T


_IMAGE: dict[str, Any] = {"shapes": (IMAGES,), "specs": (P(None, None, "x"),), "out": P(None, None, "x")}
_COMPLEX: dict[str, Any] = {"shapes": ((512, 512, 512),), "dtype": torch.complex64}
_CUBE = 512**3 * 8 // 8
_WINDOWS = 8 * 64 * 4 * (130 * 257 - 128 * 256)
"""The bytes around a rank's part of IMAGES, of 128 lines and 256 columns, that has neighbours on three sides."""


def _decoding(heads: int) -> dict[str, Any]:
    cache = (1, heads, 2**17, 128)
    specs = (P(), P(None, None, "x"), P(None, None, "x"))
    return {"shapes": ((1, 32, 1, 128), cache, cache), "specs": specs, "out": P(), "before": "3758"}


EXAMPLES: tuple[Example, ...] = (
    # A row that all get: who holds it sends it once at least.
    Example("x[40]", lambda x: x[40], ROW, 0, P(), before="1879"),
    Example("x[-1]", lambda x: x[-1], ROW, 0, P(), before="1879"),
    Example("x[[1, 60, 3]]", lambda x: x[torch.tensor([1, 60, 3])], 3 * ROW, 0, P(), before="1879"),
    Example("x[::2]", lambda x: x[::2], 0, 0),
    Example("gather of 3 rows", lambda x: x.gather(0, torch.zeros(3, COLUMNS, dtype=torch.long)), 3 * ROW, 0, P()),
    # Rows that all have are written where they belong.
    Example(
        "index_copy", lambda x: x.index_copy(0, torch.tensor([5]), torch.ones(1, COLUMNS)), 0, 0, before="1879 to 3758"
    ),
    Example("slice_scatter", lambda x: x.slice_scatter(torch.ones(1, COLUMNS), 0, 5, 6), 0, 0, before="1879 to 3758"),
    Example("index_add", lambda x: x.index_add(0, torch.tensor([1, 5]), torch.ones(2, COLUMNS)), 0, 0),
    Example(
        "scatter_add",
        lambda x: x.scatter_add(0, torch.zeros(3, COLUMNS, dtype=torch.long), torch.ones(3, COLUMNS)),
        0,
        0,
        before="up to 15032",
    ),
    # Neighbours' rows.
    Example("roll", lambda x: x.roll(1, 0), ROW, ROW, before="1879 to 3758"),
    Example("diff by slices", lambda x: x[1:] - x[:-1], ROW, ROW, before="1879 to 3758"),
    Example("torch.diff", lambda x: torch.diff(x, dim=0), ROW, ROW, before="1879 to 3758"),
    Example("token shift", lambda x: F.pad(x, (0, 0, 1, -1)), ROW, ROW, before="1879 to 3758"),
    Example("cat of slices, shifted", lambda x: torch.cat([x[1:], x[:1]]), ROW, ROW),
    # Each of 8 shards of two more rows begins a row further on: rank 7 sends six rows, and one more around.
    Example("pad by a row on both sides", lambda x: F.pad(x, (0, 0, 1, 1)), 6 * ROW, 6 * ROW),
    Example("circular pad by cat", lambda x: torch.cat([x[-1:], x, x[:1]]), 7 * ROW, 6 * ROW),
    Example("circular pad", lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"), 7 * LINE, **_IMAGE),
    Example("replicate pad", lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), 6 * LINE, 6 * LINE, **_IMAGE),
    Example("max_pool1d", _pooled(F.max_pool1d), ROW, 2 * ROW),  # the gradient goes back to where the maximum was
    Example("avg_pool1d", _pooled(F.avg_pool1d), ROW, ROW),
    Example("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), LINE, 2 * LINE, **_IMAGE),
    Example("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), LINE, LINE, **_IMAGE),
    Example("unfold", lambda x: x.unfold(0, 3, 1), 2 * ROW, 2 * ROW),
    Example("heat by slices", _heat, 2 * ROW, before="176"),
    # A gradient of writes to slices is traced with a position of each element: few elements.
    Example("heat by slices of few rows", _heat, 512, 512, shapes=((2**13, 64),)),
    Example("heat by pad and conv2d", _heat_by_convolution, 2 * ROW, 2 * ROW, before="235"),
    Example("bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 2 * LINE, 2 * LINE, **_IMAGE),
    Example("conv2d", _convolved, 2 * LINE, 2 * LINE, **_IMAGE),
    Example(
        "conv2d on a mesh of two axes",
        _convolved,
        _WINDOWS,
        _WINDOWS,
        P(None, None, "x", "y"),
        (IMAGES,),
        (P(None, None, "x", "y"),),
        before="33.6",
        axes=(4, 2),
    ),
    Example(
        "local_response_norm",  # two of eight channels on either side; the gradient sums as many windows
        lambda x: F.local_response_norm(x, 5),
        4 * LINE * 512 // 64,
        8 * LINE * 512 // 64,
        P(None, "x"),
        (IMAGES,),
        (P(None, "x"),),
    ),
    # Rows that change places.
    Example("flip", lambda x: x.flip(0), SHARD, SHARD),
    Example("split in halves", lambda x: x.split(ROWS // 2), SHARD, SHARD, (P("x"), P("x"))),
    Example("interleave", lambda x: torch.stack([x[::2], x[1::2]], 1).flatten(0, 1), 0, 0),
    # A few of many: candidates of all ranks, for each column on the rank that merges it, then the results to all.
    Example("topk of all", lambda x: x.flatten().topk(8), 7 * 8 * 12, 7 * 8 * 12, (P(), P()), before="up to 15032"),
    Example("topk by column", lambda x: x.topk(8, 0), MERGE * 8 * 3 * ROW, MERGE * 8 * 3 * ROW, (P(), P())),
    Example("kthvalue", lambda x: x.kthvalue(3, 0), 7 / 8 * 4 * 3 * ROW, 7 / 8 * 4 * 3 * ROW, (P(), P())),
    Example("max with positions", lambda x: x.max(0), MERGE * 3 * ROW, MERGE * 3 * ROW, (P(), P())),
    Example("argmax", lambda x: x.argmax(0), MERGE * 3 * ROW, None, P()),
    # Numbers that all merge.
    Example("prod", lambda x: x.prod(), 7 * 4, None, P(), before="up to 15032"),
    Example("prod by column", lambda x: x.prod(0), MERGE * ROW, MERGE * ROW, P()),
    Example("cumsum", lambda x: x.cumsum(0), MERGE * ROW, MERGE * ROW),
    Example("norm", lambda x: x.norm(), MERGE * 4, MERGE * 4, P()),
    Example("norm of order 3", lambda x: torch.linalg.vector_norm(x, 3), MERGE * 4, MERGE * 4, P()),
    Example("logsumexp", lambda x: x.logsumexp(0), 2 * MERGE * ROW, 2 * MERGE * ROW, P()),
    Example("softmax", lambda x: x.softmax(0), 2 * MERGE * ROW, 3 * MERGE * ROW),
    Example("normalize", lambda x: F.normalize(x, dim=0), MERGE * ROW, 2 * MERGE * ROW),
    Example("cosine_similarity", lambda x: F.cosine_similarity(x, x + 1, dim=0), 3 * MERGE * ROW, 3 * MERGE * ROW, P()),
    Example("clip by the norm", _clipped, MERGE * 4, 2 * MERGE * 4),
    Example("LAMB", _lamb, 2 * MERGE * 4, None, P("x"), [(ROWS, COLUMNS)] * 3, [P("x")] * 3),
    Example(
        "weight norm by column",
        lambda v, g: torch._weight_norm(v, g, 1),
        MERGE * ROW,
        2 * MERGE * ROW,
        P("x"),
        ((ROWS, COLUMNS), (1, COLUMNS)),
        (P("x"), P()),
    ),
    # Transforms: all data change places once, or twice where the result is laid out as the operand.
    Example("fftn", torch.fft.fftn, 7 / 8 * _CUBE, 7 / 8 * _CUBE, P(None, "x"), **_COMPLEX),
    Example("fft along the sharded dim", lambda x: torch.fft.fft(x, dim=0), MERGE * _CUBE, MERGE * _CUBE, **_COMPLEX),
    Example("rfft2", torch.fft.rfft2, 512 * 8 * (2049 - 250), None, P(None, "x"), ((4096, 4096),)),
    # Attention of one query: an output and a sum for each head and rank are merged.
    Example("decoding", F.scaled_dot_product_attention, MERGE * 4 * 32 * 129, None, **_decoding(32)),
    Example(
        "decoding with grouped heads",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        MERGE * 4 * 32 * 129,
        None,
        **_decoding(8),
    ),
)

EXCEPTIONS: dict[str, str] = {
    "circular pad by cat, gradient": "the row at each end is exchanged alone, before it is added where it belongs",
    "heat by slices of few rows, gradient": "a row goes around three times, where two do",
    "prod by column": "at the default prices one collective of all products takes less time than two of fewer bytes",
    "prod by column, gradient": "the gradient is computed from products before and after each row, which are shifted",
    "cosine_similarity, gradient": "the sum of the cotangent is merged once for each operand",
}
"""Reasons of functions, and of gradients, that send more."""
