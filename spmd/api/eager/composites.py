"""Composite operators of torch that write to plain tensors of their own, or read memory; DTensors run them by others.

Torch makes them of other operators before `__torch_dispatch__` sees them. The kernels here have the dispatch key that
only tensors with a `__torch_dispatch__` have, and tensors under a mode, so calls on plain tensors never reach them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd.api.values.dtensor import DTensor
from spmd.ir.graph import iterate_leaves

aten = torch.ops.aten
_VF: Any = torch._VF  # type: ignore[attr-defined]
_LIBRARY = torch.library.Library("aten", "IMPL")
_KEY = "PythonTLSSnapshot"


def pack(data: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """`_pack_padded_sequence`: the packed data, and the plain batch size of each time."""
    places = torch.arange(data.shape[:2].numel()).view(data.shape[:2])
    places, sizes = _VF._pack_padded_sequence(places, _plain(lengths).cpu(), batch_first)
    return data.flatten(0, 1).index_select(0, places.to(data.device)), sizes


def _pack_backward(grad: Tensor, shape: Sequence[int], sizes: Tensor, batch_first: bool) -> Tensor:
    return _pad_packed(grad, sizes, batch_first, 0.0, shape[1 if batch_first else 0])[0]


def _pad_packed(
    data: Tensor, sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """`_pad_packed_sequence`: the padded data, and the plain length of each sample."""
    places = torch.arange(len(data))
    places, lengths = _VF._pad_packed_sequence(places, _plain(sizes).cpu(), batch_first, -1, total_length)
    places = places.to(data.device)
    found = data.index_select(0, places.clamp_min(0).flatten()).unflatten(0, places.shape)
    return found.masked_fill((places < 0).view(*places.shape, *[1] * (data.ndim - 1)), padding_value), lengths


def _pad_sequence(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    metas = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in sequences]
    padded = aten.pad_sequence.default(metas, batch_first, padding_value, padding_side)  # raises what is wrong
    longest = padded.shape[1 if batch_first else 0]

    def whole(one: Tensor) -> Tensor:
        missing = [longest - len(one), 0] if padding_side == "left" else [0, longest - len(one)]
        return F.pad(one.to(padded.dtype), [0, 0] * (one.ndim - 1) + missing, value=padding_value)

    return torch.stack([whole(one) for one in sequences], 0 if batch_first else 1)


def _with_plain_places(op: torch._ops.OpOverload, value: Tensor, places: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _decomposed(op, value, _plain(places), *args, **kwargs)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _decomposed(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _register(op: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
    """Let a function run a composite operator if there are DTensors among its arguments."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        has_dtensor = any(isinstance(leaf, DTensor) for leaf in iterate_leaves((args, kwargs)))
        return function(*args, **kwargs) if has_dtensor else _decomposed(op, *args, **kwargs)

    _LIBRARY.impl(op, kernel, _KEY)


_register(aten.pad_sequence.default, _pad_sequence)
_register(aten._pad_packed_sequence.default, _pad_packed)
_register(aten._pack_padded_sequence_backward.default, _pack_backward)

for _op in (
    aten.tensor_split.tensor_indices_or_sections, aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data,
):  # fmt: skip
    _register(_op, functools.partial(_with_plain_places, _op))
