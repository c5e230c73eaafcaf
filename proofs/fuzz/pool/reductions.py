"""Reductions and scans."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operator, along, unary
from proofs.fuzz.tensors import Kind


def _over(text: str, *, nonempty: bool = True) -> Operator:
    """A reduction over some dims, `d` in the text; `k` is whether they are kept."""

    def operator(d: Draw) -> str:
        x = d.floats((1, 4), nonempty=nonempty)
        return text.format(x=x, d=d.dims(x), k=d.maybe())

    return operator


def _norm(d: Draw) -> str:
    x = d.floats((1, 4), nonempty=True)
    order = d.choice("2", "1", "3", "float('inf')", "-float('inf')", "0.5", "0")
    return f"torch.linalg.vector_norm({x} + 0.2, {order}, dim={d.dims(x)}, keepdim={d.maybe()})"


def _of(kind: Kind, text: str) -> Operator:
    def operator(d: Draw) -> str:
        x = d.tensor((kind,), (1, 4), nonempty=True)
        return text.format(x=x, d=d.dim(x), k=d.maybe())

    return operator


def _quantile(d: Draw) -> str:
    x = d.floats((1, 3), nonempty=True)
    dim = d.dim(x)
    d.distinct(x, dim)
    how = d.choice("linear", "lower", "higher", "midpoint", "nearest")
    q = d.choice("0.3", "torch.tensor([0.2, 0.7])")
    return f"torch.quantile({x}, {q}, dim={dim}, interpolation='{how}')"


def _std_mean(d: Draw) -> str:
    """The deviation of distinct numbers: for equal ones its gradient is infinite."""
    x = d.floats((1, 4), nonempty=True, where=lambda t: t.shape[-1] > 1)
    return f"torch.std_mean({x} + torch.arange({x.shape[-1]}) * 2, -1, correction=0)"


def _trace(d: Draw) -> str:
    return f"{d.floats(2)}.trace()"


OPERATORS: Mapping[str, Operator] = {
    "sum": unary("{x}.sum()"),
    "mean": unary("{x}.mean()", nonempty=True),
    "sum_dim": _over("{x}.sum({d}, keepdim={k})", nonempty=False),
    "mean_dim": _over("{x}.mean({d}, keepdim={k})"),
    "prod": along("{x}.tanh().prod({d}, keepdim={k})", nonempty=False),
    "prod_all": unary("{x}.sin().prod()"),
    "amax": _over("{x}.amax({d}, keepdim={k})"),
    "amin": _over("torch.amin({x}, {d}, keepdim={k})"),
    "max_all": unary("{x}.max()", nonempty=True),
    "min_all": unary("{x}.min()", nonempty=True),
    "aminmax": along("torch.aminmax({x}, dim={d}, keepdim={k})"),
    "var": _over("{x}.var({d}, correction=0, keepdim={k})"),
    "std": _over(
        "({x} + torch.arange({x}.numel()).view({x}.shape)).std({d}, correction=0, keepdim={k})"
        " if {x}.shape[-1] > 1 else {x}.sum({d})"
    ),
    "var_mean": along("torch.var_mean({x}, {d}, correction=0, keepdim={k})"),
    "var_all": unary("torch.var({x}, correction=0)", nonempty=True),
    "logsumexp": _over("torch.logsumexp({x}, {d}, keepdim={k})"),
    "vector_norm": _norm,
    "norm": _over("torch.norm({x} + 0.3, dim={d}, keepdim={k})"),
    "norm_all": unary("({x} + 0.3).norm()"),
    "count_nonzero": along("torch.count_nonzero({x}.relu(), {d})"),
    "all": _of(Kind.BOOL, "{x}.all({d}, keepdim={k})"),
    "any": _of(Kind.BOOL, "torch.any({x}, {d}, keepdim={k})"),
    "any_all": _of(Kind.BOOL, "{x}.any()"),
    "all_all": _of(Kind.BOOL, "{x}.all()"),
    "any_of_compared": along("({x} > 0.6).any({d}, keepdim={k})"),
    "all_of_compared": along("({x} > -0.6).all({d}, keepdim={k})"),
    "any_all_of_compared": unary("({x} > 1.2).any()"),
    "bool_sum": _of(Kind.BOOL, "{x}.sum({d}, keepdim={k})"),
    "int_sum": _of(Kind.INT, "{x}.sum({d}, keepdim={k})"),
    "int_prod": _of(Kind.INT, "({x} % 3).prod({d})"),
    "int_amax": _of(Kind.INT, "{x}.amax({d}, keepdim={k})"),
    "int_max": _of(Kind.INT, "{x}.max({d}).values"),
    "int_cumsum": _of(Kind.INT, "{x}.cumsum({d})"),
    "int_argmax": _of(Kind.INT, "{x}.argmax({d})"),
    "bool_argmax": _of(Kind.BOOL, "{x}.long().argmax({d})"),
    "complex_sum": _of(Kind.COMPLEX, "{x}.sum({d}, keepdim={k})"),
    "complex_mean": _of(Kind.COMPLEX, "{x}.mean({d})"),
    "complex_prod": _of(Kind.COMPLEX, "({x} / ({x}.abs() + 1)).prod({d})"),
    "complex_cumsum": _of(Kind.COMPLEX, "{x}.cumsum({d})"),
    "argmax": along("{x}.argmax({d}, keepdim={k})"),
    "argmin": along("torch.argmin({x}, {d}, keepdim={k})"),
    "argmax_all": unary("{x}.argmax()", nonempty=True),
    "max_dim": along("torch.max({x}, {d}, keepdim={k})"),
    "min_dim": along("{x}.min({d}, keepdim={k})"),
    "median": along("torch.median({x}, {d}, keepdim={k})", distinct=True),
    "nanmedian": along("torch.where({x} > 1.1, torch.nan, {x}).nanmedian({d}).values.nan_to_num(0.5)", distinct=True),
    "mode": along("torch.mode(({x} * 1.3).round(), {d}).values"),
    "quantile": _quantile,
    "nanmean": _over("torch.where({x} > 0.6, torch.nan, {x}).nanmean({d}, keepdim={k}).nan_to_num(0.2)"),
    "nansum": _over("torch.nansum(torch.where({x} < -0.4, torch.nan, {x}), {d}, keepdim={k})"),
    "cumsum": along("{x}.cumsum({d})", nonempty=False),
    "cumprod": along("torch.cumprod({x}.sin() + 0.3, {d})", nonempty=False),
    "cummax": along("torch.cummax({x}, {d})"),
    "cummax_values": along("torch.cummax({x}, {d}).values"),
    "cummin": along("{x}.cummin({d}).values"),
    "logcumsumexp": along("torch.logcumsumexp({x}, {d})"),
    "diff": along("torch.diff({x}, dim={d})"),
    "diff_twice": along("{x}.diff(n=2, dim={d})"),
    "trapezoid": along("torch.trapezoid({x}, dim={d})"),
    "cumulative_trapezoid": along("torch.cumulative_trapezoid({x}, dx=0.5, dim={d})"),
    "trace": _trace,
    "softmax": along("{x}.softmax({d})"),
    "log_softmax": along("F.log_softmax({x}, {d})"),
    "softmin": along("F.softmin({x}, {d})"),
    "masked_softmax": along("{x}.masked_fill({x} > 1.2, -float('inf')).softmax({d}).nan_to_num(0.1)"),
    "normalize": along("F.normalize({x} + 0.2, dim={d})"),
    "std_mean": _std_mean,
    "renorm": along("torch.renorm({x} + 0.1, 2, {d}, 1.5)"),
}
