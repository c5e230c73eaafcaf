"""`F.ctc_loss` in a trace: by an operator whose results have static shapes, so lengths may be values of the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spmd.errors import TraceError
from spmd.tracing.source import user_source, where
from spmd.tracing.traced_tensor import known_value

_REDUCTIONS = ("none", "mean", "sum")


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss`, and `torch.ctc_loss`, in which a reduction is a number.

    Raises:
        TraceError: lengths that are known and do not fit.
    """
    from spmd.rules.ops.ctc import ctc_losses  # few need it: `import spmd` leaves rules out

    given = [
        x if isinstance(x, Tensor) else torch.tensor(x, device=log_probs.device)
        for x in (input_lengths, target_lengths)
    ]
    inputs, labels = (x.to(torch.int64).reshape(-1) for x in given)
    single = log_probs.ndim == 2
    if single:
        log_probs = log_probs.unsqueeze(1)
    _check_lengths("input_lengths", inputs, log_probs.shape[1], log_probs.shape[0])
    _check_lengths("target_lengths", labels, log_probs.shape[1], targets.shape[-1])
    targets = targets.to(torch.int64)
    if single:
        targets = targets.reshape(1, -1)
    elif targets.ndim == 1:
        targets = _padded(targets, labels)
    losses = ctc_losses(log_probs, targets, inputs, labels, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    kind = reduction if isinstance(reduction, str) else _REDUCTIONS[reduction]
    if kind == "mean":
        return (losses / labels.clamp_min(1)).mean()
    if kind == "sum":
        return losses.sum()
    return losses[0] if single else losses


def _padded(targets: Tensor, lengths: Tensor) -> Tensor:
    """The targets of each sample in a row, from those of all samples behind each other."""
    known = known_value(lengths)
    longest = targets.numel() if known is None else int(known.max()) if known.numel() else 0
    starts = lengths.cumsum(0) - lengths
    places = starts[:, None] + torch.arange(longest, device=targets.device)
    return targets[places.clamp_max(max(targets.numel() - 1, 0))] if targets.numel() else targets[places[:, :0]]


def _check_lengths(name: str, lengths: Tensor, batch: int, longest: int) -> None:
    known = known_value(lengths)
    found: Sequence[int] = [] if known is None else known.tolist()
    if lengths.numel() != batch or any(not 0 <= length <= longest for length in found):
        got = f"{lengths.numel()} lengths" if known is None else found
        raise TraceError(
            f"{name} of ctc_loss at {where(user_source())} must be {batch} lengths of 0 to {longest} (got {got})."
        )
