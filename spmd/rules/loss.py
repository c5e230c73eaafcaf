"""Losses with a `reduction` argument, and negative log likelihood over sharded classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import attrs
import torch

from spmd.placement import Partial, Placement, Replicate, Shard
from spmd.rules.builders import pointwise
from spmd.rules.lookup import filled, local_index, pick
from spmd.rules.notation import Rows, factors
from spmd.rules.partial import linear
from spmd.rules.rule import Call, Factors, Row, Rule
from spmd.spec import TensorMeta

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2
"""torch's numbers for `reduction`."""


def _by_reduction(none: Rule, mean: Rule, sum: Rule) -> Rule:
    """The rule that a call's `reduction` argument chooses."""
    rules = {_NONE: none, _MEAN: mean, _SUM: sum}
    return Rule(lambda call: rules[call.argument("reduction")].factorize(call))


def _elementwise(operands: int, *rows: Rows) -> Rule:
    """A loss of every element on its own, then reduced. A mean over shards of unequal size is no sum of means."""
    terms = ", ".join(["..."] * operands)
    return _by_reduction(
        factors(f"{terms} -> ...", *rows),
        factors(f"{terms} -> ", *rows, replicate="..."),
        factors(f"{terms} -> ", *rows, sum="..."),
    )


def _uncut(rule: Rule) -> Rule:
    """`rule` with all factors replicated: the mean divides by the number of elements that the rank sees."""

    def factorize(call: Call) -> Factors:
        found = rule.factorize(call)
        return attrs.evolve(found, replicate=frozenset(found.sizes))

    return Rule(factorize)


def _elementwise_backward(*rows: Rows) -> Rule:
    each = pointwise(linear("grad_output"), *rows)
    return _by_reduction(each, _uncut(each), each)


def _class_dim(scores: TensorMeta) -> int:
    return 1 if scores.ndim > 1 else 0


def _nll(
    axes: tuple[str, ...],
    call: Call,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's classes' share of the loss; the total weight is known to all, as targets and weights are."""
    whole: TensorMeta = call.argument("self")
    dim = _class_dim(whole)
    picked = pick(scores, dim, target.unsqueeze(dim), whole.shape[dim], axes).squeeze(dim)
    counted = _target_weight(target, weight, ignore_index, scores.dtype)
    loss = -picked * counted
    if reduction == _NONE:
        return loss, counted if scores.ndim == 1 else scores.new_zeros(())
    total = counted.sum()
    return (loss.sum() if reduction == _SUM else loss.sum() / total), total


def _target_weight(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weight of every target's class, zero where it is ignored."""
    kept = target != ignore_index
    if weight is None:
        return kept.to(dtype)
    found = weight[torch.where(kept, target, torch.zeros_like(target))]
    return torch.where(kept, found, torch.zeros_like(found))


def _nll_backward(
    axes: tuple[str, ...],
    call: Call,
    grad: torch.Tensor,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    whole: TensorMeta = call.argument("self")
    dim = _class_dim(whole)
    local, held = local_index(target, whole.shape[dim], scores.shape[dim], axes)
    scale = -grad * _target_weight(target, weight, ignore_index, scores.dtype)
    if reduction == _MEAN:
        scale = scale / total_weight
    scale = torch.where(held, scale, torch.zeros_like(scale))
    empty = torch.zeros_like(filled(scores, dim))
    return empty.scatter(dim, local.unsqueeze(dim), scale.unsqueeze(dim)).narrow(dim, 0, scores.shape[dim])


def _cut_classes(call: Call) -> Iterator[Row]:
    cut: tuple[Placement, ...] = (Shard(_class_dim(call.argument("self"))), *(Replicate() for _ in call.operands[1:]))
    yield Row(cut, (Partial("sum"), Replicate()), _nll)


def _cut_classes_backward(call: Call) -> Iterator[Row]:
    cut = Shard(_class_dim(call.argument("self")))
    yield Row((Replicate(), cut, *(Replicate() for _ in call.operands[2:])), (cut,), _nll_backward)


def _nll_rule(classes: str, target: str) -> Rule:
    """The forward rule of scores with the dims `classes`, of which `c` is the class."""
    rows = (linear("self:0"), _cut_classes)
    terms = f"{classes}, {target}, c"
    return _by_reduction(
        factors(f"{terms} -> {target}, ", *rows, sum=target, replicate="c"),
        factors(f"{terms} -> , ", *rows, replicate=f"{target} c"),
        factors(f"{terms} -> , ", *rows, sum=target, replicate="c"),
    )


def _nll_backward_rule(classes: str, target: str) -> Rule:
    rows = (linear("grad_output"), _cut_classes_backward)
    each = factors(f"{target}, {classes}, {target}, c, -> {classes}", *rows, replicate="c")
    scalar = factors(f", {classes}, {target}, c, -> {classes}", *rows, replicate="c")
    return _by_reduction(each, scalar, scalar)


def _by_ndim(operand: str, rules: Mapping[int, Rule]) -> Rule:
    """The rule for the number of dims of an argument."""
    return Rule(lambda call: rules[call.argument(operand).ndim].factorize(call))


LOSS: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.nll_loss_forward.default: _by_ndim("self", {1: _nll_rule("c", ""), 2: _nll_rule("b c", "b")}),
        aten.nll_loss_backward.default: _by_ndim(
            "self", {1: _nll_backward_rule("c", ""), 2: _nll_backward_rule("b c", "b")}
        ),
        aten.nll_loss2d_forward.default: _nll_rule("b c h w", "b h w"),
        aten.nll_loss2d_backward.default: _nll_backward_rule("b c h w", "b h w"),
        aten.mse_loss.default: _elementwise(2),
        aten.mse_loss_backward.default: _elementwise_backward(),
        aten.smooth_l1_loss.default: _elementwise(2),
        aten.smooth_l1_loss_backward.default: _elementwise_backward(),
        aten.huber_loss.default: _elementwise(2),
        aten.huber_loss_backward.default: _elementwise_backward(),
        aten.binary_cross_entropy.default: _elementwise(3, linear("weight")),
        aten.binary_cross_entropy_backward.default: _elementwise_backward(linear("weight")),
    }
)
