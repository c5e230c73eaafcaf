"""Calls of losses: those that torch's module database lacks, and more options and uneven batches of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from proofs.nn_sweep.call import Call, call
from proofs.nn_sweep.draws import below, positive, real, signs


def _distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left - right).abs().amax(-1)


def _nll(loss: Callable[..., nn.Module]) -> list[Callable[[], Call]]:
    return [
        lambda: call(loss(), real(5, 6).log_softmax(1), below(6, 5)),
        lambda: call(loss(weight=positive(6), ignore_index=2), real(5, 6, 3, 4).log_softmax(1), below(6, 5, 3, 4)),
    ]


CALLS: Mapping[str, Sequence[Callable[[], Call]]] = MappingProxyType(
    {
        "AdaptiveLogSoftmaxWithLoss": [
            lambda: call(nn.AdaptiveLogSoftmaxWithLoss(6, 12, [3, 7], div_value=2.0), real(5, 6), below(12, 5)),
            lambda: call(nn.AdaptiveLogSoftmaxWithLoss(6, 12, [4], head_bias=True), real(5, 6), below(12, 5)),
        ],
        "BCELoss": [lambda: call(nn.BCELoss(weight=positive(6)), positive(5, 6), positive(5, 6))],
        "BCEWithLogitsLoss": [
            lambda: call(nn.BCEWithLogitsLoss(pos_weight=positive(6)), real(5, 6), positive(5, 6)),
        ],
        "CTCLoss": [
            lambda: call(
                nn.CTCLoss(), real(9, 5, 6).log_softmax(2), 1 + below(5, 5, 3), (9, 8, 7, 9, 9), (3, 2, 3, 1, 0)
            ),
            lambda: call(
                nn.CTCLoss(reduction="sum", zero_infinity=True),
                real(9, 5, 6).log_softmax(2),
                1 + below(5, 5, 3),
                torch.tensor([9, 8, 7, 9, 9]),
                torch.tensor([3, 2, 3, 1, 1]),
            ),
        ],
        "CrossEntropyLoss": [
            lambda: call(nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=2), real(5, 6), below(6, 5)),
            lambda: call(nn.CrossEntropyLoss(weight=positive(6)), real(5, 6, 3), below(6, 5, 3)),
            lambda: call(nn.CrossEntropyLoss(reduction="none"), real(5, 6), real(5, 6).softmax(1)),
        ],
        "CosineEmbeddingLoss": [
            lambda: call(nn.CosineEmbeddingLoss(margin=0.2), real(5, 6), real(5, 6), signs(5)),
        ],
        "KLDivLoss": [
            lambda: call(
                nn.KLDivLoss(reduction="batchmean", log_target=True),
                real(5, 6).log_softmax(1),
                real(5, 6).log_softmax(1),
            ),
        ],
        "MultiLabelMarginLoss": [
            lambda: call(nn.MultiLabelMarginLoss(), real(2, 4), torch.tensor([[3, 0, -1, 1], [1, -1, 2, 0]])),
            lambda: call(nn.MultiLabelMarginLoss(reduction="none"), real(5), torch.tensor([3, 0, -1, 1, 2])),
        ],
        "MultiMarginLoss": [lambda: call(nn.MultiMarginLoss(2, 0.5, positive(6)), real(5, 6), below(6, 5))],
        "NLLLoss": _nll(nn.NLLLoss),
        "NLLLoss2d": _nll(nn.NLLLoss2d),
        "TripletMarginLoss": [
            lambda: call(nn.TripletMarginLoss(), real(5, 6), real(5, 6), real(5, 6)),
            lambda: call(nn.TripletMarginLoss(p=1.0, swap=True, reduction="none"), real(5, 6), real(5, 6), real(5, 6)),
        ],
        "TripletMarginWithDistanceLoss": [
            lambda: call(nn.TripletMarginWithDistanceLoss(), real(5, 6), real(5, 6), real(5, 6)),
            lambda: call(
                nn.TripletMarginWithDistanceLoss(distance_function=_distance, swap=True, margin=0.3),
                real(5, 6),
                real(5, 6),
                real(5, 6),
            ),
        ],
    }
)
"""The calls by name of the class."""
