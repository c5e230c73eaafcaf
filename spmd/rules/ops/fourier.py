"""Fourier transforms over several dims of which one is sharded: one exchange makes it complete, and shards another.

The dims that are complete are transformed before the exchange, the sharded one after it, as in FFTW's transposed
transforms (Frigo & Johnson 2005). A real side is that of the last dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from spmd.collectives import all_to_all
from spmd.collectives.environment import axis_size
from spmd.core.placement import Shard
from spmd.ir.call import Call
from spmd.rules.builders import along, empty_results
from spmd.rules.ops.one_dim import padded, resized
from spmd.rules.partial import linear
from spmd.rules.rule import Axes, Row, table

aten = torch.ops.aten


def _c2c(x: Tensor, dims: Sequence[int], normalization: int, forward: bool) -> Tensor:
    return aten._fft_c2c.default(x, dims, normalization, forward) if dims and x.numel() else x


def _r2c(x: Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    if x.numel():
        return aten._fft_r2c.default(x, dims, normalization, onesided)  # type: ignore[no-any-return]
    length = x.shape[dims[-1]]
    return x.new_zeros(resized(x.shape, dims[-1], length // 2 + 1 if onesided else length), dtype=x.dtype.to_complex())


def _c2r(x: Tensor, dims: Sequence[int], normalization: int, size: int) -> Tensor:
    if x.numel():
        return aten._fft_c2r.default(x, dims, normalization, size)  # type: ignore[no-any-return]
    return x.new_zeros(resized(x.shape, dims[-1], size), dtype=x.dtype.to_real())


@attrs.frozen
class _Transposed:
    """A transform of an operand whose dim `cut` is sharded; the result is sharded in the dim `to`."""

    cut: int
    to: int

    def __call__(
        self, axes: Axes, call: Call, x: Tensor, dim: Sequence[int], normalization: int, option: int | bool
    ) -> Tensor:
        *_, last = dims = [each % x.ndim for each in dim]
        rest = [each for each in dims if each != self.cut]
        if call.op is aten._fft_c2c.default:
            x = self._exchanged(axes, call, _c2c(x, rest, normalization, bool(option)))
            return _c2c(x, [self.cut], normalization, bool(option))
        if call.op is aten._fft_r2c.default:
            if self.cut != last:
                x = self._exchanged(axes, call, _r2c(x, rest, normalization, bool(option)))
                return _c2c(x, [self.cut], normalization, True)
            x = self._exchanged(axes, call, _c2c(x.to(x.dtype.to_complex()), rest, normalization, True))
            return _c2c(x, [last], normalization, True).narrow(last, 0, call.results[0].shape[last])
        if self.cut == last:
            x = self._exchanged(axes, call, _c2c(x, rest, normalization, False))
            return _c2r(x, [last], normalization, option)
        x = self._exchanged(axes, call, _c2c(x, rest[:-1], normalization, False))
        return _c2r(x, [self.cut, last], normalization, option)

    def _exchanged(self, axes: Axes, call: Call, x: Tensor) -> Tensor:
        sizes = call.results[0].shape[self.to], call.operands[0].shape[self.cut]
        return all_to_all(x.contiguous(), axes, self.to, self.cut, tiled=True, sizes=sizes)


@attrs.frozen
class _ToReal:
    """A transform to real numbers of an operand whose dim `cut`, not the last one, is sharded, as is the result's.

    The last dim must be complete in the last step: it is sharded only while the dim `cut` is transformed.
    """

    cut: int

    def __call__(self, axes: Axes, call: Call, x: Tensor, dim: Sequence[int], normalization: int, size: int) -> Tensor:
        *rest, last = (each % x.ndim for each in dim)
        x = _c2c(x, [each for each in rest if each != self.cut], normalization, False)
        length, whole, ranks = x.shape[last], call.operands[0].shape[self.cut], axis_size(axes)
        chunk = -(-length // ranks)
        held = x.shape[self.cut]
        x = padded(x, last, 0, chunk * ranks - length).contiguous()
        x = _c2c(
            all_to_all(x, axes, last, self.cut, tiled=True, sizes=(chunk, whole)), [self.cut], normalization, False
        )
        x = all_to_all(x.contiguous(), axes, self.cut, last, tiled=True, sizes=(held, chunk * ranks))
        return _c2r(x.narrow(last, 0, length), [last], normalization, size)


def _one_is_sharded(call: Call) -> Iterator[Row]:
    (x,), to_real = call.operands, call.op is aten._fft_c2r.default
    dims = [dim % x.ndim for dim in call.argument("dim")]
    if len(dims) == 1:
        return
    for cut in dims:
        for to in dims:
            if to != cut and not (to_real and to == dims[-1]):
                yield Row((Shard(cut),), (Shard(to),), _Transposed(cut, to))
        if to_real and cut != dims[-1]:
            yield Row((Shard(cut),), (Shard(cut),), _ToReal(cut))


FOURIER = table({
    "_fft_c2c _fft_r2c _fft_c2r": along(linear("self"), _one_is_sharded, empty=empty_results),
})  # fmt: skip
