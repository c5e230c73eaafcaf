"""`torch.func` transforms and sharding annotations inside a program."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operator
from spmd.core.spec import P


def _vmap(d: Draw) -> str:
    x = d.floats((1, 4), nonempty=True)
    inner = d.choice(
        "row - row.flatten().mean()", "row.sin() * row.sum()", "row.flatten().cumsum(0)", "row.flatten().softmax(0)"
    )
    return f"torch.func.vmap(lambda row: {inner}, in_dims={d.dim(x)})({x})"


def _vmap_two(d: Draw) -> str:
    x = d.floats((2, 3), nonempty=True)
    y = d.sized((x.shape[1],))
    return f"torch.func.vmap(lambda row, other: row * other, in_dims=(1, 0), out_dims=-1)({x}, {y})"


def _grad(d: Draw) -> str:
    return f"torch.func.grad(lambda t: (t.sin() * t.sum().cos()).sum())({d.floats((0, 3))})"


def _row_grad(d: Draw) -> str:
    return f"torch.func.vmap(torch.func.grad(lambda t: (t.sin() * t.sum()).sum()))({d.floats((1, 3), nonempty=True)})"


def _jvp(d: Draw) -> str:
    x = d.floats((0, 3))
    return f"torch.func.jvp(lambda t: t.sin() * t, ({x}.contiguous(),), ({d.like(x)}.contiguous(),))"


def _vjp(d: Draw) -> str:
    x = d.floats((0, 3))
    return f"torch.func.vjp(lambda t: t.tanh() * t, {x})[1]({d.like(x)})[0]"


def _jacrev(d: Draw) -> str:
    return f"torch.func.jacrev(lambda t: t.sin() * t.sum())({d.floats((0, 1))})"


def _linearize(d: Draw) -> str:
    x = d.floats((0, 2))
    at, tangent = f"{x}.contiguous()", f"{d.like(x)}.contiguous()"
    linearized = f"torch.func.linearize(lambda t: t.sin() * t, {at})[1]({tangent})"
    # torch's linearize is wrong within another transform: it treats the tangent, or the primal, as a constant
    return f"({linearized} if is_tracing() else torch.func.jvp(lambda t: t.sin() * t, ({at},), ({tangent},))[1])"


def _placed(name: str) -> Operator:
    """A sharding annotation, which is left out on one device."""

    def operator(d: Draw) -> str:
        x = d.floats((0, 4))
        return f"(spmd.{name}({x} * 2, {d.spec(x.ndim)!r}) if is_tracing() else {x} * 2)"

    return operator


def _placed_jvp(d: Draw) -> str:
    """The forward-mode derivative of sharding annotations."""
    x = d.floats((0, 3))
    y = d.like(x)
    specs = d.spec(x.ndim), d.spec(x.ndim)
    placed = f"lambda t: spmd.reshard(spmd.constrain(t.sin(), {specs[0]!r}), {specs[1]!r}) * t"
    derivative = "torch.func.jvp({}, ({x}.contiguous(),), ({y}.contiguous(),))"
    traced, plain = (derivative.format(f, x=x, y=y) for f in (placed, "lambda t: t.sin() * t"))
    return f"({traced} if is_tracing() else {plain})"


def _chain(*, even: bool) -> Operator:
    """A sequence of reshards, also to partial sums; if `even`, of a value of shape (4, 4), which most axes divide."""

    def operator(d: Draw) -> str:
        x = d.sized((4, 4)) if even else d.floats((1, 3))
        axes = tuple(d.rng.sample(d.axes, len(d.axes)))
        whole = [P(axes), P(None, axes), P(axes[::-1]), *(P(axis) for axis in axes)] if even else [P()]
        text = f"{x} * 2"
        for step in range(3):
            spec = d.choice(*whole) if d.maybe() else d.spec(x.ndim, "sum", 0.3)
            text = f"spmd.{'reshard' if step else 'constrain'}({text}, {spec!r})"
        return f"({text} if is_tracing() else {x} * 2)"

    return operator


def _nested(d: Draw) -> str:
    x = d.floats((0, 4))
    specs = f"{d.spec(x.ndim)!r}, {d.spec(x.ndim)!r}"
    return f"(spmd.jit(torch.sin, {specs}, mesh=mesh)({x}) if is_tracing() else torch.sin({x}))"


OPERATORS: Mapping[str, Operator] = {
    "inner_vmap": _vmap,
    "inner_vmap_two": _vmap_two,
    "inner_grad": _grad,
    "inner_row_grad": _row_grad,
    "inner_jvp": _jvp,
    "inner_vjp": _vjp,
    "inner_jacrev": _jacrev,
    "inner_linearize": _linearize,
    "constrain": _placed("constrain"),
    "reshard": _placed("reshard"),
    "placed_jvp": _placed_jvp,
    "reshard_chain": _chain(even=False),
    "reshard_chain_even": _chain(even=True),
    "nested_jit": _nested,
}
