"""Calls of layers: those that torch's module database lacks, and more options and uneven batches of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from proofs.nn_sweep.call import Call, call
from proofs.nn_sweep.draws import below, positive, real


class _Residual(nn.Module):
    """A module as users write them: parameters, a buffer that it assigns to, submodules, a tied weight."""

    count: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.count += 1
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return {"out": x + self.second(torch.relu(self.first(x))) * self.scale, "mean": self.mean + 0}


class _Indexed(nn.Module):
    """Uses a container by index or key."""

    def __init__(self, parts: nn.Module, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.parts, self.apply_parts = parts, forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_parts(self.parts, x)


def _chain(parts: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for part in parts:  # type: ignore[attr-defined]
        x = part(x)
    return x


def _list() -> Call:
    return call(_Indexed(nn.ModuleList([nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)]), _chain), real(5, 6))


def _dict() -> Call:
    parts = nn.ModuleDict({"gate": nn.Linear(6, 6), "value": nn.Linear(6, 6)})
    return call(_Indexed(parts, lambda parts, x: torch.sigmoid(parts["gate"](x)) * parts["value"](x)), real(5, 6))  # type: ignore[index]


def _parameter_list() -> Call:
    parts = nn.ParameterList([torch.randn(6, 7), torch.randn(7)])
    return call(_Indexed(parts, lambda parts, x: x @ parts[0] + parts[1]), real(5, 6))  # type: ignore[index]


def _parameter_dict() -> Call:
    parts = nn.ParameterDict({"weight": torch.randn(6, 7), "bias": torch.randn(7)})
    return call(_Indexed(parts, lambda parts, x: x @ parts["weight"] + parts["bias"]), real(5, 6))  # type: ignore[index]


def _unpool(dims: int, size: int) -> Call:
    pool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
    pooled, at = pool(real(5, 3, *(size,) * dims))
    return call(getattr(nn, f"MaxUnpool{dims}d")(2), pooled, at)


def _shapes(module: Callable[[], nn.Module], *shapes: Sequence[int]) -> list[Callable[[], Call]]:
    return [lambda shape=shape: call(module(), real(*shape)) for shape in shapes]  # type: ignore[misc]


def _tracked(dims: int, module: Callable[..., nn.Module]) -> list[Callable[[], Call]]:
    shape = (5, 6, *(3,) * dims) if dims else (5, 6)
    return [
        lambda: call(module(), real(*shape)),
        lambda: call(module(momentum=0.3, affine=False), real(*shape)),
        lambda: call(module(track_running_stats=False), real(*shape)),
    ]


_NORMS: Mapping[str, list[Callable[[], Call]]] = {
    "BatchNorm1d": [
        *_tracked(0, lambda **options: nn.BatchNorm1d(6, **options)),
        *_shapes(lambda: nn.BatchNorm1d(6, momentum=None), (5, 6, 4)),
    ],
    "BatchNorm2d": _tracked(2, lambda **options: nn.BatchNorm2d(6, **options)),
    "BatchNorm3d": _tracked(3, lambda **options: nn.BatchNorm3d(6, **options)),
    "InstanceNorm1d": [
        *_shapes(lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True), (5, 6, 4), (6, 4)),
        *_shapes(lambda: nn.InstanceNorm1d(6), (5, 6, 4)),
    ],
    "InstanceNorm2d": _shapes(lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True), (5, 6, 3, 4)),
    "InstanceNorm3d": _shapes(lambda: nn.InstanceNorm3d(6, affine=True, track_running_stats=True), (5, 6, 3, 2, 4)),
    "LazyBatchNorm1d": _shapes(nn.LazyBatchNorm1d, (5, 6), (5, 6, 4)),
    "LazyBatchNorm2d": _shapes(nn.LazyBatchNorm2d, (5, 6, 3, 4)),
    "LazyBatchNorm3d": _shapes(nn.LazyBatchNorm3d, (5, 6, 3, 2, 4)),
    "LazyInstanceNorm1d": _shapes(lambda: nn.LazyInstanceNorm1d(affine=True, track_running_stats=True), (5, 6, 4)),
    "LazyInstanceNorm2d": _shapes(lambda: nn.LazyInstanceNorm2d(affine=True), (5, 6, 3, 4)),
    "LazyInstanceNorm3d": _shapes(nn.LazyInstanceNorm3d, (5, 6, 3, 2, 4)),
    "SyncBatchNorm": _shapes(lambda: nn.SyncBatchNorm(6), (5, 6, 4), (5, 6, 3, 4)),
    "LayerNorm": _shapes(lambda: nn.LayerNorm((3, 6)), (5, 3, 6)),
    "RMSNorm": _shapes(lambda: nn.RMSNorm((3, 6)), (5, 3, 6)),
    "GroupNorm": _shapes(lambda: nn.GroupNorm(3, 6), (5, 6), (5, 6, 3, 4)),
    "LocalResponseNorm": _shapes(lambda: nn.LocalResponseNorm(3), (5, 6, 4)),
    "CrossMapLRN2d": _shapes(lambda: nn.CrossMapLRN2d(3), (5, 6, 3, 4)),
}

_DROPOUTS: Mapping[str, list[Callable[[], Call]]] = {
    "Dropout": [
        *_shapes(lambda: nn.Dropout(0.4), (5, 6), (8,)),
        *_shapes(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.2)), (5, 6)),
    ],
    "Dropout1d": _shapes(lambda: nn.Dropout1d(0.4), (5, 6, 4), (6, 4)),
    "Dropout2d": _shapes(lambda: nn.Dropout2d(0.4), (5, 6, 3, 4), (5, 6, 4)),
    "Dropout3d": _shapes(lambda: nn.Dropout3d(0.4), (5, 6, 3, 4, 2), (6, 3, 4, 2)),
    "AlphaDropout": _shapes(lambda: nn.AlphaDropout(0.4), (5, 6)),
    "FeatureAlphaDropout": _shapes(lambda: nn.FeatureAlphaDropout(0.4), (5, 6, 4)),
    "RReLU": _shapes(nn.RReLU, (5, 6), (4, 8)),
}

_SHAPES: Mapping[str, list[Callable[[], Call]]] = {
    "ChannelShuffle": _shapes(lambda: nn.ChannelShuffle(2), (5, 6, 3, 4), (4, 8, 4, 2)),
    "Flatten": [*_shapes(nn.Flatten, (5, 6, 3)), *_shapes(lambda: nn.Flatten(0, 1), (4, 6, 3))],
    "Unflatten": [
        *_shapes(lambda: nn.Unflatten(1, (2, 3)), (5, 6)),
        *_shapes(lambda: nn.Unflatten(-1, (4, -1)), (5, 8)),
    ],
    "Fold": _shapes(lambda: nn.Fold((4, 5), (2, 3), dilation=1, padding=1, stride=2), (5, 18, 9), (18, 9)),
    "Unfold": _shapes(lambda: nn.Unfold((2, 3), padding=1, stride=2), (5, 3, 4, 5), (3, 4, 5)),
    "Identity": _shapes(nn.Identity, (5, 6)),
    "PixelShuffle": _shapes(lambda: nn.PixelShuffle(2), (5, 8, 3, 4), (4, 4, 4)),
    "PixelUnshuffle": _shapes(lambda: nn.PixelUnshuffle(2), (5, 2, 6, 4), (2, 8, 4)),
    "Upsample": [
        *_shapes(lambda: nn.Upsample(scale_factor=2), (5, 3, 4)),
        *_shapes(lambda: nn.Upsample(size=7, mode="linear", align_corners=True), (5, 3, 4)),
        *_shapes(lambda: nn.Upsample(size=(5, 8), mode="bilinear"), (5, 3, 4, 4)),
        *_shapes(lambda: nn.Upsample(scale_factor=1.5, mode="bicubic"), (5, 3, 4, 4)),
        *_shapes(lambda: nn.Upsample(scale_factor=2, mode="trilinear"), (5, 2, 4, 2, 3)),
    ],
    "UpsamplingBilinear2d": _shapes(lambda: nn.UpsamplingBilinear2d(scale_factor=2), (5, 3, 4, 4)),
    "UpsamplingNearest2d": _shapes(lambda: nn.UpsamplingNearest2d(scale_factor=2), (5, 3, 4, 4)),
    "CircularPad1d": _shapes(lambda: nn.CircularPad1d((1, 2)), (5, 4, 6)),
    "CircularPad2d": _shapes(lambda: nn.CircularPad2d((1, 2, 0, 1)), (5, 4, 6, 4)),
    "ReflectionPad2d": _shapes(lambda: nn.ReflectionPad2d((1, 2, 0, 1)), (5, 4, 6, 4)),
    "ReplicationPad3d": _shapes(lambda: nn.ReplicationPad3d((1, 2, 0, 1, 1, 0)), (5, 4, 6, 4, 3)),
    "ConstantPad2d": _shapes(lambda: nn.ConstantPad2d((1, -1, 0, 1), 0.5), (5, 4, 6, 4)),
    "ZeroPad2d": _shapes(lambda: nn.ZeroPad2d((1, -1, 0, 1)), (5, 4, 6, 4)),
}

_POOLS: Mapping[str, list[Callable[[], Call]]] = {
    "MaxUnpool1d": [lambda: _unpool(1, 8)],
    "MaxUnpool2d": [lambda: _unpool(2, 6)],
    "MaxUnpool3d": [lambda: _unpool(3, 4)],
    "MaxPool1d": _shapes(lambda: nn.MaxPool1d(3, 2, padding=1, return_indices=True), (5, 4, 7)),
    "MaxPool2d": _shapes(lambda: nn.MaxPool2d(3, 2, padding=1, return_indices=True), (5, 4, 7, 6)),
    "AvgPool2d": _shapes(lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), (5, 4, 7, 6)),
    "AdaptiveAvgPool2d": _shapes(lambda: nn.AdaptiveAvgPool2d((3, 2)), (5, 4, 7, 6)),
    "AdaptiveMaxPool2d": _shapes(lambda: nn.AdaptiveMaxPool2d((3, 2), return_indices=True), (5, 4, 7, 6)),
}

_PRODUCTS: Mapping[str, list[Callable[[], Call]]] = {
    "Linear": _shapes(lambda: nn.Linear(6, 7), (5, 6), (5, 3, 6), (5, 1, 3, 6)),
    "LazyLinear": _shapes(lambda: nn.LazyLinear(7), (5, 6), (5, 3, 6)),
    "Bilinear": [lambda: call(nn.Bilinear(3, 4, 6), real(5, 3), real(5, 4))],
    "Conv1d": _shapes(lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="circular"), (5, 4, 8)),
    "Conv2d": [
        *_shapes(lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4), (5, 4, 6, 5)),
        *_shapes(lambda: nn.Conv2d(4, 8, 3, stride=2, dilation=2, padding=2, padding_mode="reflect"), (5, 4, 6, 5)),
    ],
    "ConvTranspose2d": _shapes(lambda: nn.ConvTranspose2d(4, 8, 3, 2, 1, 1, groups=2), (5, 4, 3, 4)),
    "Embedding": [
        lambda: call(nn.Embedding(9, 6, padding_idx=2), below(9, 5, 3)),
        lambda: call(nn.Embedding(9, 6, max_norm=0.7), below(9, 5, 3)),
        lambda: call(nn.Embedding(9, 6, scale_grad_by_freq=True), below(9, 5, 3)),
    ],
    "EmbeddingBag": [
        lambda: call(nn.EmbeddingBag(9, 6), below(9, 5, 3)),
        lambda: call(nn.EmbeddingBag(9, 6, mode="sum"), below(9, 5, 3), per_sample_weights=positive(5, 3)),
        lambda: call(nn.EmbeddingBag(9, 6, mode="max"), below(9, 5, 3)),
        lambda: call(nn.EmbeddingBag(9, 6, mode="sum", padding_idx=2), below(9, 5, 3)),
        lambda: call(nn.EmbeddingBag(9, 6, max_norm=0.7), below(9, 5, 3)),
        lambda: call(nn.EmbeddingBag(9, 6), below(9, 10), torch.tensor([0, 3, 3, 7])),
        lambda: call(
            nn.EmbeddingBag(9, 6, mode="sum", include_last_offset=True), below(9, 10), torch.tensor([0, 3, 7, 10])
        ),
    ],
    "CosineSimilarity": [
        lambda: call(nn.CosineSimilarity(), real(5, 6), real(5, 6)),
        lambda: call(nn.CosineSimilarity(dim=0), real(5, 6), real(5, 1)),
    ],
    "PairwiseDistance": [
        lambda: call(nn.PairwiseDistance(), real(5, 6), real(5, 6)),
        lambda: call(nn.PairwiseDistance(p=1, keepdim=True), real(5, 6), real(6)),
    ],
}

_ACTIVATIONS: Mapping[str, list[Callable[[], Call]]] = {
    "Hardsigmoid": _shapes(nn.Hardsigmoid, (5, 6)),
    "ReLU": _shapes(lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True)), (5, 6)),
    "PReLU": _shapes(lambda: nn.PReLU(6), (5, 6, 3)),
    "GLU": _shapes(lambda: nn.GLU(1), (5, 8, 3)),
    "Softmax": _shapes(lambda: nn.Softmax(1), (5, 6, 3)),
}

_CONTAINERS: Mapping[str, list[Callable[[], Call]]] = {
    "Module": [lambda: call(_Residual(), real(5, 6))],
    "ModuleDict": [_dict],
    "ModuleList": [_list],
    "ParameterDict": [_parameter_dict],
    "ParameterList": [_parameter_list],
    "Sequential": _shapes(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)),
        (5, 3, 4, 4),
    ),
}

CALLS: Mapping[str, Sequence[Callable[[], Call]]] = MappingProxyType(
    {**_NORMS, **_DROPOUTS, **_SHAPES, **_POOLS, **_PRODUCTS, **_ACTIVATIONS, **_CONTAINERS}
)
"""The calls by name of the class."""
