"""Losses."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operator


def _reduction(d: Draw) -> str:
    return f"reduction='{d.choice('mean', 'sum', 'none')}'"


def _pair(text: str) -> Operator:
    """A loss of two tensors of one shape, `x` and `y` in the text; `r` is the reduction."""

    def operator(d: Draw) -> str:
        x = d.floats((1, 3), nonempty=True)
        return text.format(x=x, y=d.like(x), r=_reduction(d))

    return operator


def _cross_entropy(d: Draw) -> str:
    x = d.floats((2, 3), nonempty=True)
    target = d.index((x.shape[0], *x.shape[2:]), x.shape[1])
    more = d.choice("", ", ignore_index=0", ", label_smoothing=0.1", f", weight={d.sized((x.shape[1],))}.abs() + 0.1")
    reduction = d.choice("sum", "none", "mean" if "ignore" not in more else "sum")
    return f"F.cross_entropy({x}, {target}, reduction='{reduction}'{more})"


def _cross_entropy_soft(d: Draw) -> str:
    x = d.floats(2, nonempty=True)
    return f"F.cross_entropy({x}, {d.like(x)}.softmax(1), {_reduction(d)})"


def _nll(d: Draw) -> str:
    x = d.floats((2, 3), nonempty=True)
    target = d.index((x.shape[0], *x.shape[2:]), x.shape[1])
    return f"F.nll_loss({x}.log_softmax(1), {target}, {_reduction(d)})"


def _multi_margin(d: Draw) -> str:
    x = d.floats(2, nonempty=True)
    return f"F.multi_margin_loss({x}, {d.index((x.shape[0],), x.shape[1])}, {_reduction(d)})"


def _triplet(d: Draw) -> str:
    x = d.floats(2, nonempty=True)
    return f"F.triplet_margin_loss({x}, {d.like(x)} + 2, {d.like(x)} - 1, {_reduction(d)})"


OPERATORS: Mapping[str, Operator] = {
    "cross_entropy": _cross_entropy,
    "cross_entropy_soft": _cross_entropy_soft,
    "nll_loss": _nll,
    "multi_margin_loss": _multi_margin,
    "triplet_margin_loss": _triplet,
    "mse_loss": _pair("F.mse_loss({x}, {y}, {r})"),
    "l1_loss": _pair("F.l1_loss({x} + 0.1, {y}, {r})"),
    "smooth_l1_loss": _pair("F.smooth_l1_loss({x}, {y} + 0.1, {r}, beta=0.7)"),
    "huber_loss": _pair("F.huber_loss({x}, {y} + 0.1, {r})"),
    "binary_cross_entropy": _pair("F.binary_cross_entropy({x}.sigmoid() * 0.9 + 0.05, {y}.sigmoid(), {r})"),
    "binary_cross_entropy_with_logits": _pair("F.binary_cross_entropy_with_logits({x}, {y}.sigmoid(), {r})"),
    "kl_div": _pair("F.kl_div({x}.log_softmax(-1), {y}.softmax(-1), {r})"),
    "poisson_nll_loss": _pair("F.poisson_nll_loss({x}.tanh(), {y}.abs(), {r})"),
    "soft_margin_loss": _pair("F.soft_margin_loss({x}, ({y} + 0.1).sign(), {r})"),
    "hinge_embedding_loss": _pair("F.hinge_embedding_loss({x}, ({y} + 0.1).sign(), {r})"),
    "margin_ranking_loss": _pair("F.margin_ranking_loss({x}, {y}, ({y} + 0.3).sign(), {r}, margin=0.2)"),
}
