"""Operators on lists of tensors."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operator


def _lists(text: str) -> Operator:
    """An operator of lists of two tensors, `xs` and `ys` in the text; `n` stands for a number."""

    def operator(d: Draw) -> str:
        first, second = d.floats((0, 3)), d.floats((1, 2))
        ys = f"[{d.like(first)}, {d.like(second)}]" if "{ys}" in text else ""
        return text.format(xs=f"[{first}, {second}]", ys=ys, n=d.number())

    return operator


OPERATORS: Mapping[str, Operator] = {
    "foreach_add": _lists("torch._foreach_add({xs}, {ys}, alpha={n})"),
    "foreach_mul": _lists("torch._foreach_mul({xs}, {n})"),
    "foreach_exp": _lists("torch._foreach_exp(torch._foreach_tanh({xs}))"),
    "foreach_lerp": _lists("torch._foreach_lerp({xs}, {ys}, 0.3)"),
    "foreach_addcmul": _lists("torch._foreach_addcmul({xs}, {ys}, {ys}, value={n})"),
    "foreach_norm": _lists("torch._foreach_norm(torch._foreach_add({xs}, 0.3), 2)"),
}
