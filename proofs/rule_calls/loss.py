"""Small calls of losses."""

from __future__ import annotations

from typing import Any

import torch

import spmd.rules.ops.ctc  # noqa: F401  # registers its operators
from proofs.rule_calls.draws import Calls, Draws, call

aten = torch.ops.aten
_draws = Draws(17)
f, i = _draws.f, _draws.i

_REDUCTIONS = (0, 1, 2)


def nll() -> Calls:
    target = torch.tensor([0, 2, 4, 2])
    weight = f(5).exp()
    return [
        *(call(f(4, 5), target, w, r, ignore) for r in _REDUCTIONS for w, ignore in ((None, -100), (weight, 2))),
        *(call(f(5), torch.tensor(3), w, r, -100) for r in _REDUCTIONS for w in (None, weight)),
    ]


def nll_backward(forward: torch._ops.OpOverload, calls: Calls) -> Calls:
    found = []
    for args, _ in calls:
        loss, total = forward(*args)
        found.append(call(f(*loss.shape), *args, total))
    return found


def nll2d() -> Calls:
    weight = f(4).exp()
    return [call(f(2, 4, 3, 5), i(4, 2, 3, 5), weight, r, 2) for r in _REDUCTIONS]


def losses(*rest: Any) -> Calls:
    return [call(f(4, 5), f(4, 5), r, *rest) for r in _REDUCTIONS]


def losses_backward(*rest: Any) -> Calls:
    return [
        *(call(f(), f(4, 5), f(4, 5), r, *rest) for r in (1, 2)),
        call(f(4, 5), f(4, 5), f(4, 5), 0, *rest),
    ]


def probabilities(*shape: int) -> torch.Tensor:
    return f(*shape).sigmoid()


_LABELS = torch.tensor([[0, 3, -1, 0, 0], [2, -1, 0, 0, 0], [1, 2, 3, -1, 0], [4, 0, 1, 2, 3]])
"""The labels of four samples; -1 ends the labels of a sample."""


def multilabel_margin() -> Calls:
    return [*(call(f(4, 5), _LABELS, r) for r in _REDUCTIONS), *(call(f(5), _LABELS[0], r) for r in (1, 2))]


def margin_backward(multilabel: bool) -> Calls:
    scores, grad = f(4, 5), f(4)
    if not multilabel:
        weights = (None, f(5).exp())
        return [
            *(call(f() if r else grad, scores, i(5, 4), 1, 1.0, w, r) for r in _REDUCTIONS for w in weights),
            call(f(), f(5), i(5, 1), 2, 1.0, None, 2),
            call(f(), f(), torch.tensor(0), 1, 1.0, None, 2),
        ]
    forward, backward = aten.multilabel_margin_loss_forward.default, (f(), f(5), _LABELS[0])
    found = [call(f() if r else grad, scores, _LABELS, r, forward(scores, _LABELS, r)[1]) for r in _REDUCTIONS]
    return [*found, call(*backward, 2, forward(*backward[1:], 2)[1])]


def ctc(*grad: torch.Tensor) -> Calls:
    """The last sample is too short for its target."""
    lengths = torch.tensor([6, 5, 6, 2]), torch.tensor([2, 1, 0, 2])
    return [call(*grad, f(6, 4, 5).log_softmax(-1), torch.tensor([[1, 2], [3, 0], [0, 0], [4, 4]]), *lengths, 0, True)]


LOSS = {
    torch.ops.spmd_rules.ctc_loss.default: ctc(),
    torch.ops.spmd_rules.ctc_loss_backward.default: ctc(f(4)),
    aten.multilabel_margin_loss_forward.default: multilabel_margin(),
    aten.multi_margin_loss_backward.default: margin_backward(multilabel=False),
    aten.multilabel_margin_loss_backward.default: margin_backward(multilabel=True),
    aten.nll_loss_forward.default: nll(),
    aten.nll_loss_backward.default: nll_backward(aten.nll_loss_forward.default, nll()),
    aten.nll_loss2d_forward.default: nll2d(),
    aten.nll_loss2d_backward.default: nll_backward(aten.nll_loss2d_forward.default, nll2d()),
    aten.mse_loss.default: losses(),
    aten.mse_loss_backward.default: losses_backward(),
    aten.smooth_l1_loss.default: losses(0.5),
    aten.smooth_l1_loss_backward.default: losses_backward(0.5),
    aten.huber_loss.default: losses(0.5),
    aten.huber_loss_backward.default: losses_backward(0.5),
    aten.binary_cross_entropy.default: [
        call(probabilities(4, 5), probabilities(4, 5), w, r) for r in _REDUCTIONS for w in (None, f(4, 5))
    ],
    aten.binary_cross_entropy_backward.default: [
        call(f() if r else f(4, 5), probabilities(4, 5), probabilities(4, 5), w, r)
        for r in _REDUCTIONS
        for w in (None, f(4, 5))
    ],
}
