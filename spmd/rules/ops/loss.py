"""Losses with a `reduction` argument, and negative log likelihood over sharded classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from spmd.collectives import shard_offset
from spmd.core.placement import Partial, Replicate, Shard
from spmd.ir.call import Call
from spmd.rules.builders import replicated_only, zero_results
from spmd.rules.notation import Rows, by_call, factors
from spmd.rules.ops.lookup import filled, local_index, missing, pick, shard_starts
from spmd.rules.partial import decreasing, ignores, linear
from spmd.rules.rule import Axes, Row, Rule, table

_NONE, _MEAN, _SUM = 0, 1, 2
"""torch's numbers for `reduction`."""


def _elementwise(operands: int, *rows: Rows, backward: bool = False) -> Rule:
    """The rule of an elementwise loss that is then reduced, or of its gradient.

    A mean cannot be sharded: it is no sum of the ranks' means, and its gradient divides by the global number of
    elements, which a rank's operator does not know.
    """
    terms = ", ".join(["..."] * operands)

    def choose(call: Call) -> Rule:
        kind = call.argument("reduction")
        result = "..." if backward or kind == _NONE else ""
        return factors(
            f"{terms} -> {result}", *rows, sum="..." if kind == _SUM else "", replicate="..." if kind == _MEAN else ""
        )

    return by_call(choose)


def _gradient(operands: int, *rows: Rows) -> Rule:
    return _elementwise(operands, linear("grad_output"), *rows, backward=True)


def _class_dim(call: Call) -> int:
    return 1 if call.argument("self").ndim > 1 else 0


def _nll(
    axes: Axes, call: Call, scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """The part of the loss of targets in this rank's shard of the classes, and the total weight.

    Targets and weights are replicated, so every rank computes the whole total weight.
    """
    dim = _class_dim(call)
    starts = shard_starts(target, call.operands[0].shape[dim], axes, partial(_look_up_class, ignored=ignored))
    picked, held = pick(scores, dim, target.unsqueeze(dim), starts.unsqueeze(dim))
    counted = _target_weight(target, weight, ignored, scores.dtype)
    kept, loss = target != ignored, -picked.squeeze(dim) * counted
    others = torch.where(kept, missing(loss), torch.zeros_like(loss))  # the loss of ignored targets is 0.0, not -0.0
    loss = torch.where(held.squeeze(dim) & kept, loss, others)
    if reduction == _NONE:
        return loss, counted if scores.ndim == 1 else scores.new_zeros(())
    total = counted.sum()
    return (loss.sum() if reduction == _SUM else loss.sum() / total), total


def _look_up_class(table: Tensor, target: Tensor, *, ignored: int) -> Tensor:
    """The items of a table at the targets, 0 for ignored ones, by the operator that names a target out of range."""
    scores = -table.double().expand(target.numel(), -1)  # the lookup of integers is exact
    items, _ = torch.ops.aten.nll_loss_forward.default(scores, target.reshape(-1), None, _NONE, ignored)
    return items.reshape(target.shape).long()


def _target_weight(target: Tensor, weight: Tensor | None, ignored: int, dtype: torch.dtype) -> Tensor:
    """The weight of every target's class, zero for ignored targets."""
    kept = target != ignored
    if weight is None:
        return kept.to(dtype)
    places = torch.where(kept, target, torch.zeros_like(target))
    found = weight.index_select(0, places.reshape(-1)).reshape(places.shape)  # a 0-d tensor as an index is a number
    return torch.where(kept, found, torch.zeros_like(found))


def _nll_backward(
    axes: Axes, call: Call, grad: Tensor, scores: Tensor, target: Tensor, weight: Tensor | None, *options: Tensor
) -> Tensor:
    dim, (reduction, ignored, total) = _class_dim(call), options
    local, held = local_index(target, shard_offset(call.operands[1].shape[dim], axes), scores.shape[dim])
    scale = -grad * _target_weight(target, weight, int(ignored), scores.dtype)
    scale = scale / total if reduction == _MEAN else scale
    scale = torch.where(held, scale, torch.zeros_like(scale))
    empty = torch.zeros_like(filled(scores, dim))
    return empty.scatter(dim, local.unsqueeze(dim), scale.unsqueeze(dim)).narrow(dim, 0, scores.shape[dim])


def _cut_classes(call: Call) -> Iterator[Row]:
    others = (Replicate(),) * (len(call.operands) - 1)
    yield Row((Shard(_class_dim(call)), *others), (Partial("sum"), Replicate()), _nll)


def _cut_classes_backward(call: Call) -> Iterator[Row]:
    cut, others = Shard(_class_dim(call)), (Replicate(),) * (len(call.operands) - 2)
    yield Row((Replicate(), cut, *others), (cut,), _nll_backward)


def _likelihood(call: Call) -> tuple[str, str, str]:
    """The terms of the scores (`c` are the classes), of the targets and of the loss."""
    scores = {1: "c", 2: "b c", 4: "b c h w"}[call.argument("self").ndim]
    targets = scores.replace("c", "")
    return scores, targets, targets if call.argument("reduction") == _NONE else ""


def _weighted(call: Call) -> Iterator[Row]:
    """Losses and their sum are linear in the class weights; without these, a single loss decreases in the scores.

    The total weight, result 1, of several losses that are not reduced is zero, so it is not Partial.
    """
    reduction, alone = call.argument("reduction"), call.argument("self").ndim == 1
    if call.argument("weight") is not None and reduction != _MEAN:
        yield from linear("weight:0" if reduction == _NONE and not alone else "weight:0 1")(call)
    elif call.argument("weight") is None and (reduction == _NONE or alone):
        yield from decreasing("self:0")(call)


def _nll_forward_rule(call: Call) -> Rule:
    scores, targets, loss = _likelihood(call)
    fixed = f"{targets} c" if call.argument("reduction") == _MEAN else "c"
    pattern = f"{scores}, {targets}, c -> {loss}, "
    return factors(pattern, linear("self:0"), _weighted, _cut_classes, sum=targets, replicate=fixed)


def _nll_backward_rule(call: Call) -> Rule:
    scores, targets, loss = _likelihood(call)
    pattern = f"{loss}, {scores}, {targets}, c, -> {scores}"
    return factors(pattern, linear("grad_output"), ignores("self"), _cut_classes_backward, replicate="c")


def _multilabel_margin(call: Call) -> Rule:
    """The operator has a rule because torch's decomposition is wrong: it counts targets after the first -1."""
    if call.argument("self").ndim < 2:
        return replicated_only()
    kind = call.argument("reduction")
    pattern = f"b c, b c -> {'b' if kind == _NONE else ''}, b c"
    return factors(pattern, sum="" if kind == _NONE else "b", replicate="b c" if kind == _MEAN else "c")


def _margin_backward(targets: str) -> Rule:
    """The rule of the gradient of a margin loss of scores `b c`; `targets` has the terms of the remaining operands."""

    def choose(call: Call) -> Rule:
        if call.argument("self").ndim == 0:
            return replicated_only(linear("grad_output"))
        batch = "b" if call.argument("self").ndim == 2 else ""
        kind = call.argument("reduction")
        given = targets if batch else targets.replace("b,", "*,").replace("b ", "")
        pattern = f"{batch if kind == _NONE else ''}, {batch} c, {given} -> {batch} c"
        return factors(pattern, linear("grad_output", "weight"), replicate=f"{batch} c" if kind == _MEAN else "c")

    return by_call(choose)


def _chunked(call: Call) -> Rule:
    """Cross entropy of a linear layer, with its gradients, in chunks of the batch `n`.

    With the reduction `mean`, `n` cannot be sharded, as the loss is divided by the global batch.
    """
    requested = [call.argument(f"compute_{name}_grad") for name in ("input", "linear_weight", "linear_bias")]
    terms = [term if wanted else "*" for term, wanted in zip(("n f", "c f", "c"), requested, strict=True)]
    fixed = "n c f" if call.argument("reduction") == "mean" else "c f"
    return factors(f"n f, c f, n, c, c -> , {', '.join(terms)}", sum="n", replicate=fixed)


LAZILY_DEFINED: Mapping[str, Rule] = {
    "torch_nn::_linear_cross_entropy_batch_chunked": by_call(_chunked),
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": factors("n f, c f, n, c, c -> n", replicate="c f"),
}
"""By schema name, the rules of operators that torch defines only when they are first used."""

LOSS = table({
    "multilabel_margin_loss_forward": by_call(_multilabel_margin, empty=zero_results),
    "multi_margin_loss_backward": _margin_backward("b, c"),
    "multilabel_margin_loss_backward": _margin_backward("b c, b c"),
    "nll_loss_forward nll_loss2d_forward": by_call(_nll_forward_rule),
    "nll_loss_backward nll_loss2d_backward": by_call(_nll_backward_rule),
    "mse_loss smooth_l1_loss huber_loss": _elementwise(2),
    "mse_loss_backward": _gradient(3, linear("self target")),
    "smooth_l1_loss_backward huber_loss_backward": _gradient(3),
    "binary_cross_entropy": _elementwise(3, linear("weight")),
    "binary_cross_entropy_backward": _gradient(4, linear("weight")),
})  # fmt: skip
