"""Casts, and arithmetic of integers, bools and complex numbers."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operator
from proofs.fuzz.tensors import Kind


def _of(kind: Kind, text: str) -> Operator:
    def operator(d: Draw) -> str:
        x = d.tensor((kind,))
        return text.format(x=x, y=d.broadcast(x, kind) if "{y}" in text else "", n=d.integer(1, 4), f=d.number())

    return operator


_CASTS = {
    "to_long": (Kind.FLOAT, "({x} * 3).long()"),
    "to_int32": (Kind.FLOAT, "({x} * 3).to(torch.int32).to(torch.int64)"),
    "to_bool": (Kind.FLOAT, "({x} > 0.1).to(torch.float64) + {x}"),
    "float_to_bool": (Kind.FLOAT, "({x} * 2).floor().bool()"),
    "to_complex": (Kind.FLOAT, "{x}.to(torch.complex128)"),
    "to_float32": (Kind.FLOAT, "({x} * 4).round().div(4).to(torch.float32).to(torch.float64)"),
    "to_bfloat16": (Kind.FLOAT, "({x} * 2).round().div(2).to(torch.bfloat16).double()"),
    "int_to_float": (Kind.INT, "{x}.double() * {f}"),
    "int_promoted": (Kind.INT, "{x} * {f}"),
    "int_true_divide": (Kind.INT, "{x} / {n}"),
    "bool_to_float": (Kind.BOOL, "{x}.to(torch.float64) - {f}"),
    "bool_to_long": (Kind.BOOL, "{x}.long() * {n}"),
    "bool_promoted": (Kind.BOOL, "{x} * {f}"),
    "complex_of_bool": (Kind.BOOL, "{x}.to(torch.complex128) * 2j"),
    "int_add": (Kind.INT, "{x} + {y}"),
    "int_mul": (Kind.INT, "({x} * {y}) % 17"),
    "int_sub_alpha": (Kind.INT, "torch.sub({x}, {y}, alpha={n})"),
    "int_floor_divide": (Kind.INT, "{x} // ({y}.abs() + 1)"),
    "int_trunc_divide": (Kind.INT, "torch.div({x}, {y}.abs() + {n}, rounding_mode='trunc')"),
    "int_remainder": (Kind.INT, "{x} % ({y}.abs() + {n})"),
    "int_fmod": (Kind.INT, "torch.fmod({x}, {n} + 1)"),
    "int_pow": (Kind.INT, "({x} % 5) ** 2"),
    "int_abs": (Kind.INT, "{x}.abs() - {y}"),
    "int_maximum": (Kind.INT, "torch.maximum({x}, {y} - 1)"),
    "int_clamp": (Kind.INT, "{x}.clamp(-2, 3)"),
    "int_compare": (Kind.INT, "{x} > {y}"),
    "int_equal": (Kind.INT, "{x} == {y}"),
    "int_sign": (Kind.INT, "torch.sign({x})"),
    "bitwise_and": (Kind.INT, "{x} & {y}"),
    "bitwise_or": (Kind.INT, "{x} | {n}"),
    "bitwise_xor": (Kind.INT, "torch.bitwise_xor({x}, {y})"),
    "bitwise_not": (Kind.INT, "~{x}"),
    "shift_left": (Kind.INT, "({x} % 8) << 1"),
    "shift_right": (Kind.INT, "{x} >> 1"),
    "gcd": (Kind.INT, "torch.gcd({x}, {y})"),
    "lcm": (Kind.INT, "torch.lcm({x} % 7, {y} % 5 + 1)"),
    "int_where": (Kind.INT, "torch.where({x} > 0, {x}, {y})"),
    "isin": (Kind.INT, "torch.isin({x}, torch.tensor([-1, 2, 3]))"),
    "bool_and": (Kind.BOOL, "{x} & {y}"),
    "bool_or": (Kind.BOOL, "torch.logical_or({x}, {y})"),
    "bool_xor": (Kind.BOOL, "{x} ^ {y}"),
    "bool_not": (Kind.BOOL, "~{x}"),
    "bool_eq": (Kind.BOOL, "{x} == {y}"),
}


def _complex(d: Draw) -> str:
    x = d.floats((0, 3))
    y = d.like(x)
    return d.choice(f"torch.complex({x}, {y})", f"torch.polar({x}.abs() + 0.1, {y})", f"{x} + 1j * {y}")


def _view_as_complex(d: Draw) -> str:
    x = d.floats(
        (1, 4), where=lambda t: t.shape[-1] == 2 and t.stride(-1) == 1, make=lambda: (d.integer(1, 4), 2), fresh=0.2
    )
    return f"torch.view_as_complex({x}.contiguous())" if d.maybe() else f"torch.view_as_complex({x} * 1.5)"


def _view_as_complex_of_transposed(d: Draw) -> str:
    x = d.floats((2, 4), where=lambda t: t.shape[0] == 2, make=lambda: (2, d.integer(1, 4), d.integer(1, 3)), fresh=0.2)
    return f"torch.view_as_complex({x}.transpose(0, -1).contiguous())"


def _mixed(d: Draw) -> str:
    """Operands of different kinds."""
    x = d.tensor((Kind.INT, Kind.BOOL, Kind.COMPLEX, Kind.FLOAT), (0, 3))
    y = d.broadcast(x, d.choice(Kind.FLOAT, Kind.INT, Kind.BOOL))
    return d.choice(f"{x} * {y}", f"{x} + {y}", f"torch.where({y} > 0, {x}, {y})")


OPERATORS: Mapping[str, Operator] = {
    **{name: _of(kind, text) for name, (kind, text) in _CASTS.items()},
    "complex": _complex,
    "view_as_complex": _view_as_complex,
    "view_as_complex_of_transposed": _view_as_complex_of_transposed,
    "promotion": _mixed,
}
