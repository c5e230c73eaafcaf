"""Connectionist temporal classification (Graves et al. 2006), whose samples are independent of each other.

torch's own operator concatenates the states of the longest target, of which no rank knows the length: here the results
have static shapes, and lengths may be values of the program. The gradient computes the states again. The namespace is
not `spmd`, whose operators are what ranks do with a mesh.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd.rules.custom import custom_operator

aten = torch.ops.aten


@torch.library.custom_op("spmd_rules::ctc_loss", mutates_args=())
def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    if not targets.shape[0]:
        return log_probs.new_empty(0)
    args = log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    loss: Tensor = aten._ctc_loss.Tensor(*args)[0]
    return loss


@_ctc_loss.register_fake
def _(log_probs: Tensor, targets: Tensor, *rest: object) -> Tensor:
    return log_probs.new_empty(targets.shape[0])


@torch.library.custom_op("spmd_rules::ctc_loss_backward", mutates_args=())
def _ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    if not targets.shape[0]:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)
    given = log_probs, targets, input_lengths, target_lengths
    loss, states = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    found: Tensor = aten._ctc_loss_backward.Tensor(grad.contiguous(), *given, loss, states, blank, zero_infinity)
    return found.contiguous()


@_ctc_loss_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


ctc_losses = custom_operator(_ctc_loss, "t b c, b s, b, b -> b", replicate="t c s", backward=_ctc_loss_backward)
"""The loss of each sample.

It takes `log_probs` [time, batch, classes], `targets` i64[batch, labels], the lengths of both i64[batch], the class of
blanks, and whether infinite losses have gradients of zero. It returns the losses [batch].
"""

CTC = ctc_losses.rules
