"""Products of matrices."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operator
from proofs.fuzz.tensors import Kind


def _mm(d: Draw) -> str:
    x = d.floats(2)
    y = d.sized((x.shape[1], None))
    return d.choice(f"{x} @ {y}", f"torch.mm({x}, {y})")


def _mm_transposed(d: Draw) -> str:
    x = d.floats(2)
    y = d.sized((None, x.shape[1]))
    return d.choice(f"{x} @ {y}.t()", f"{x}.mm({y}.T)")


def _gram(d: Draw) -> str:
    x = d.floats((2, 4))
    return d.choice(f"{x} @ {x}.mT", f"{x}.mT @ {x}")


def _bmm(d: Draw) -> str:
    x = d.floats(3)
    y = d.sized((x.shape[0], x.shape[2], None))
    return d.choice(f"torch.bmm({x}, {y})", f"{x} @ {y}")


def _matmul(d: Draw) -> str:
    """A product with broadcast batch dims."""
    x = d.floats((2, 4))
    y = d.floats(
        (2, 3),
        where=lambda t: (
            t.shape[-2] == x.shape[-1]
            and all(a == b or 1 in (a, b) for a, b in zip(t.shape[-3::-1], x.shape[-3::-1], strict=False))
        ),
        make=lambda: (x.shape[-1], d.integer(1, 4)),
    )
    return f"torch.matmul({x}, {y})"


def _mv(d: Draw) -> str:
    x = d.floats((2, 3))
    y = d.sized((x.shape[-1],))
    return d.choice(f"{x} @ {y}", f"torch.mv({x}, {y})" if x.ndim == 2 else f"torch.matmul({x}, {y})")


def _vm(d: Draw) -> str:
    x = d.floats((2, 3))
    y = d.sized((x.shape[-2],))
    return f"{y} @ {x}"


def _dot(d: Draw) -> str:
    x = d.floats(1)
    y = d.like(x)
    return d.choice(f"torch.dot({x}, {y})", f"torch.vdot({x}, {y})", f"torch.inner({x}, {y})")


def _outer(d: Draw) -> str:
    return d.choice(f"torch.outer({d.floats(1)}, {d.floats(1)})", f"torch.ger({d.floats(1)}, {d.floats(1)})")


def _addmm(d: Draw) -> str:
    x = d.floats(2)
    y = d.sized((x.shape[1], None))
    b = d.sized(d.choice((x.shape[0], y.shape[1]), (y.shape[1],), (1, y.shape[1])))
    return f"torch.addmm({b}, {x}, {y}, beta={d.choice('1', '0.5')}, alpha={d.choice('1', '-1.5')})"


def _baddbmm(d: Draw) -> str:
    x = d.floats(3)
    y = d.sized((x.shape[0], x.shape[2], None))
    b = d.sized(d.choice((x.shape[0], x.shape[1], y.shape[2]), (1, y.shape[2])))
    return f"torch.baddbmm({b}, {x}, {y}, beta=0.7)"


def _addmv(d: Draw) -> str:
    x = d.floats(2)
    return f"torch.addmv({d.sized((x.shape[0],))}, {x}, {d.sized((x.shape[1],))}, alpha=2)"


def _addbmm(d: Draw) -> str:
    x = d.floats(3)
    y = d.sized((x.shape[0], x.shape[2], None))
    return f"torch.addbmm({d.sized((x.shape[1], y.shape[2]))}, {x}, {y})"


def _addr(d: Draw) -> str:
    x = d.floats(2)
    return f"torch.addr({x}, {d.sized((x.shape[0],))}, {d.sized((x.shape[1],))})"


def _einsum(d: Draw) -> str:
    x = d.floats(3)
    a, b, c = x.shape
    pattern, shape = d.choice(
        ("abc,abd->acd", (a, b, None)),
        ("abc,dbc->ad", (None, b, c)),
        ("abc,cd->abd", (c, None)),
        ("abc,abc->b", (a, b, c)),
        ("abc,adc->abd", (a, None, c)),
        ("abc,b->ca", (b,)),
        ("abc,dc->bad", (None, c)),
        ("abc,ad->bcd", (a, None)),
    )
    return f"torch.einsum('{pattern}', {x}, {d.sized(shape)})"


def _einsum_one(d: Draw) -> str:
    x = d.floats(2)
    return f"torch.einsum('{d.choice('ij->ji', 'ij->j', 'ij->i', 'ij->')}', {x})"


def _linear(d: Draw) -> str:
    x = d.floats((1, 4))
    w = d.sized((None, x.shape[-1]))
    return f"F.linear({x}, {w})" if d.maybe() else f"F.linear({x}, {w}, {d.sized((w.shape[0],))})"


def _bilinear(d: Draw) -> str:
    x = d.floats(2)
    y = d.sized((x.shape[0], None))
    return f"F.bilinear({x}, {y}, {d.sized((None, x.shape[1], y.shape[1]))})"


def _tensordot(d: Draw) -> str:
    x = d.floats((2, 3))
    y = d.sized((x.shape[-1], None))
    return d.choice(f"torch.tensordot({x}, {y}, 1)", f"torch.tensordot({x}, {x}, ([0], [0]))")


def _kron(d: Draw) -> str:
    return f"torch.kron({d.floats((1, 2))}, {d.floats((1, 2))})"


def _multi_dot(d: Draw) -> str:
    x = d.floats(2)
    y = d.sized((x.shape[1], None))
    return f"torch.linalg.multi_dot([{x}, {y}, {d.sized((y.shape[1], None))}])"


def distances(x: str, y: str, p: str) -> str:
    """An expression that computes `torch.cdist` on one device by other operators.

    torch's jacrev of `cdist` is wrong: its backward kernel ignores batch dims that only the cotangent has. `cdist` is
    called too, times zero, so that programs which need its missing forward mode are rejected. Its gradient reads its
    result, which later lines must not write to; programs therefore use `cdist(...) * 1`.
    """
    truth = f"torch.linalg.vector_norm({x}.unsqueeze(-2) - {y}.unsqueeze(-3), {p}, dim=-1)"
    return f"torch.cdist({x}, {y}, p={p}) * 0 + {truth}"


def _cdist(d: Draw) -> str:
    x = d.floats((2, 3), nonempty=True)
    y = d.sized((*x.shape[:-2], None, x.shape[-1]))
    p = d.choice("2.0", "1.0", "3.0")
    return f"(torch.cdist({x}, {y} + 3, p={p}) * 1 if is_tracing() else {distances(x, f'({y} + 3)', p)})"


def _vecdot(d: Draw) -> str:
    x = d.floats((1, 3))
    return f"torch.linalg.vecdot({x}, {d.like(x)}, dim={d.dim(x)})"


def _cross(d: Draw) -> str:
    x = d.floats((1, 3), where=lambda t: t.shape[-1] == 3, make=lambda: (d.integer(1, 4), 3))
    return f"torch.linalg.cross({x}, {d.like(x)})"


def _matrix_power(d: Draw) -> str:
    x = d.floats((2, 3), where=lambda t: t.shape[-1] == t.shape[-2], make=lambda: (3, 3))
    return f"torch.linalg.matrix_power({x} * 0.5, {d.choice(0, 2, 3)})"


def _complex_mm(d: Draw) -> str:
    x = d.complexes(2)
    y = d.sized((x.shape[1], None), Kind.COMPLEX)
    return d.choice(f"{x} @ {y}", f"{x} @ {y}.conj()", f"{x}.conj() @ {y}")


def _int_mm(d: Draw) -> str:
    x = d.ints(2)
    return f"({x} @ {d.sized((x.shape[1], None), Kind.INT)}) % 23"


def _cosine_similarity(d: Draw) -> str:
    x = d.floats((1, 3), nonempty=True)
    return f"F.cosine_similarity({x} + 0.2, {d.like(x)} - 0.3, dim={d.dim(x)})"


def _pairwise_distance(d: Draw) -> str:
    x = d.floats((1, 2), nonempty=True)
    return f"F.pairwise_distance({x} + 0.2, {d.like(x)})"


OPERATORS: Mapping[str, Operator] = {
    "mm": _mm,
    "mm_transposed": _mm_transposed,
    "gram": _gram,
    "bmm": _bmm,
    "matmul": _matmul,
    "mv": _mv,
    "vm": _vm,
    "dot": _dot,
    "outer": _outer,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "addmv": _addmv,
    "addbmm": _addbmm,
    "addr": _addr,
    "einsum": _einsum,
    "einsum_one": _einsum_one,
    "linear": _linear,
    "bilinear": _bilinear,
    "tensordot": _tensordot,
    "kron": _kron,
    "multi_dot": _multi_dot,
    "cdist": _cdist,
    "vecdot": _vecdot,
    "cross": _cross,
    "matrix_power": _matrix_power,
    "complex_mm": _complex_mm,
    "int_mm": _int_mm,
    "cosine_similarity": _cosine_similarity,
    "pairwise_distance": _pairwise_distance,
}
