"""Small calls of convolution, normalisation and other operators on images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from proofs.rule_calls.draws import Calls, Draws, call

aten = torch.ops.aten
_draws = Draws(4)
f, i = _draws.f, _draws.i

# Image and weight; bias; stride, padding, dilation, transposed, output_padding, groups.
_CONVOLUTIONS: Sequence[tuple[Sequence[int], Sequence[int], bool, tuple[Any, ...]]] = (
    ((2, 3, 7), (4, 3, 3), True, ([1], [1], [1], False, [0], 1)),
    ((2, 3, 8), (4, 3, 3), False, ([2], [1], [1], False, [0], 1)),
    ((2, 3, 9), (2, 3, 2), True, ([3], [0], [2], False, [0], 1)),
    ((1, 2, 3), (2, 2, 5), True, ([1], [4], [1], False, [0], 1)),
    ((2, 3, 4), (4, 3, 1), True, ([1], [0], [1], False, [0], 1)),
    ((2, 3, 7, 6), (4, 3, 3, 2), True, ([2, 1], [1], [1, 3], False, [0, 0], 1)),
    ((2, 4, 5, 4), (6, 2, 3, 3), True, ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)),
    ((2, 3, 6, 5), (3, 1, 3, 3), False, ([1, 1], [1, 1], [1, 1], False, [0, 0], 3)),
    ((1, 2, 4, 3, 5), (2, 2, 3, 1, 2), False, ([1, 2, 1], [1, 0, 1], [1, 1, 1], False, [0, 0, 0], 1)),
    ((2, 3, 5), (3, 4, 3), True, ([2], [1], [1], True, [1], 1)),
    ((2, 3, 7), (3, 2, 3), False, ([1], [1], [2], True, [0], 1)),
    ((1, 2, 4), (2, 2, 2), True, ([3], [0], [1], True, [2], 1)),
    ((2, 4, 4, 5), (4, 2, 3, 3), True, ([2, 1], [1, 0], [1, 1], True, [1, 0], 2)),
)


def convolutions() -> Calls:
    return [
        call(f(*image), f(*weight), f(weight[1] * options[5] if options[3] else weight[0]) if bias else None, *options)
        for image, weight, bias, options in _CONVOLUTIONS
    ]


def convolution_gradients() -> Calls:
    found = []
    for args, _ in convolutions():
        image, weight, bias, *options = args
        result = aten.convolution.default(*args)
        sizes = None if bias is None else list(bias.shape)
        mask = [True, True, bias is not None]
        found.append(call(f(*result.shape), image, weight, sizes, *options, mask))
    image, weight, _, *options = convolutions()[5][0]
    grad = torch.ones_like(aten.convolution.default(image, weight, None, *options))
    found.append(call(grad, image, weight, None, *options, [False, True, False]))
    found.append(call(grad, image, weight, None, *options, [True, False, False]))
    return found


def batch_norms(*options: Any, statistics: bool) -> Calls:
    """Calls with and without parameters, over four channels; `options` are the arguments before the momentum."""
    given = (f(4), f(4).exp()) if statistics else ()
    return [
        call(f(3, 4, 5), f(4), f(4), *given, *options, 0.1, 1e-5),
        call(f(2, 4, 2, 3), None, None, *given, *options, 0.1, 1e-5),
        call(f(5, 4), f(4), None, *given, *options, 0.1, 1e-5),
    ]


def batch_norm_gradients(train: bool) -> Calls:
    found = []
    for mask, weight in (([True, True, True], f(4)), ([True, False, False], None), ([False, True, True], f(4))):
        image, running = f(5, 4, 3, *((2,) if weight is None else ())), (f(4), f(4).exp())
        given = (None, None) if train else running
        _, mean, invstd = aten.native_batch_norm.default(image, weight, None, *given, train, 0.1, 1e-5)
        found.append(call(f(*image.shape), image, weight, *given, mean, invstd, train, 1e-5, mask))
    return found


def without_statistics() -> Calls:
    return [call(*args[:3], None, None, *args[3:]) for args, _ in batch_norms(True, statistics=False)]


# The mode, whether samples have weights, and whether the last offset is included.
_BAGS = ((0, False, False), (0, True, True), (1, False, False), (2, False, False))


def bags() -> Calls:
    indices, offsets = i(6, 5), torch.tensor([0, 2, 4])
    return [
        call(f(6, 4), indices, offsets, False, mode, False, f(5) if weighted else None, last, -1)
        for mode, weighted, last in _BAGS
    ]


def bag_gradients() -> Calls:
    found = []
    for args, _ in bags():
        out, *found_rows = aten._embedding_bag.default(*args)
        _, indices, offsets, scale, mode, sparse, weights, *_ = args
        found.append(call(f(*out.shape), indices, offsets, *found_rows, 6, scale, mode, sparse, weights, -1))
    return found


def dense_bag_gradients() -> Calls:
    return [
        call(*args[:2], args[3] if args[3].numel() else torch.tensor([0, 0, 1, 1, 2]), *args[4:9], *args[10:])
        for args, _ in bag_gradients()
    ]


def bag_weight_gradients() -> Calls:
    indices, offsets, bag = i(6, 5), torch.tensor([0, 2, 4]), torch.tensor([0, 0, 1, 1, 2])
    return [call(f(3, 4), f(6, 4), indices, offsets, bag, 0, -1)]


def grids(*space: int) -> Calls:
    shape, dims = tuple(size - 1 for size in space), len(space)
    return [
        call(f(3, 4, *shape), f(3, 4, *space), f(3, *shape, dims).tanh(), 0, 0, False, asked)
        for asked in ([True, True], [False, True], [True, False])
    ]


def pairs() -> Calls:
    x = f(4, 5)
    return [call(f(6), x, p, aten._pdist_forward.default(x, p)) for p in (2.0, 1.0)]


SPATIAL: Mapping[torch._ops.OpOverload, Calls] = {
    aten.max_unpool2d.default: [
        call(f(3, 4, 2, 3), torch.arange(6).view(2, 3).mul(4).expand(3, 4, 2, 3), [4, 6]),
        call(f(4, 1, 2), torch.tensor([[[3, 1]]]).expand(4, 1, 2), [2, 4]),
    ],
    aten.max_unpool3d.default: [
        call(f(2, 4, 1, 1, 2), torch.tensor([3, 6]).expand(2, 4, 1, 1, 2), [2, 2, 2], [2, 2, 2], [0, 0, 0])
    ],
    aten._embedding_bag.default: bags(),
    aten._embedding_bag_forward_only.default: bags(),
    aten._embedding_bag_backward.default: bag_gradients(),
    aten._embedding_bag_dense_backward.default: dense_bag_gradients(),
    aten._embedding_bag_per_sample_weights_backward.default: bag_weight_gradients(),
    aten._pdist_forward.default: [call(f(4, 5), 2.0)],
    aten._pdist_backward.default: pairs(),
    aten.grid_sampler_2d_backward.default: grids(5, 4),
    aten.grid_sampler_3d_backward.default: grids(3, 5, 4),
    aten.convolution.default: convolutions(),
    aten.convolution_backward.default: convolution_gradients(),
    aten.native_group_norm.default: [
        call(f(3, 8, 5), f(8), f(8), 3, 8, 5, 4, 1e-5),
        call(f(4, 6, 2, 3), None, None, 4, 6, 6, 2, 1e-5),
        call(f(2, 4, 3), f(4), None, 2, 4, 3, 4, 1e-5),
    ],
    aten.native_batch_norm.default: [*batch_norms(False, statistics=True), *without_statistics()],
    aten._native_batch_norm_legit.no_stats: batch_norms(True, statistics=False),
    aten._native_batch_norm_legit_functional.default: [
        *batch_norms(True, statistics=True),
        *batch_norms(False, statistics=True),
    ],
    aten._native_batch_norm_legit_no_training.default: batch_norms(statistics=True),
    aten._batch_norm_with_update_functional.default: batch_norms(statistics=True),
    aten.native_batch_norm_backward.default: [*batch_norm_gradients(True), *batch_norm_gradients(False)],
}
