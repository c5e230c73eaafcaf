"""Programs as text."""

from __future__ import annotations

import ast

import pytest
import torch
from handmade import PlanBuilder, lowered

from spmd.core.mesh import make_mesh
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.plan.data.layout import Layout

aten = torch.ops.aten


def test_text_of_a_matmul() -> None:
    builder = PlanBuilder(make_mesh({"d": 2, "m": 2}, runtime="virtual"))
    x, w = builder.input("x", (4, 6), P("d", "m")), builder.input("params['w']", (6, 5), P("m"))
    product = builder.call(aten.mm.default, (x, w), [((4, 5), P("d", partial={"m": "sum"}))])
    whole = builder.move(product, P("d"))
    result = builder.call(aten.sin.default, (whole,), [((4, 5), P("d"))])
    assert lowered(builder.plan(result)).as_text() == (
        "# Mesh(d=2, m=2): the program of every rank\n"
        "def program(\n"
        "    x,  # f32[2,3] P('d', 'm')\n"
        "    params_w,  # f32[3,5] P('m')\n"
        "):\n"
        "    mm_1 = mm(x, params_w)  # f32[2,5] P('d', partial={'m': 'sum'})\n"
        "    all_reduce_1 = all_reduce(mm_1, 'sum', ['m'])  # f32[2,5] P('d')  "
        "← mm produces P('d', partial={'m': 'sum'}), sin requires P('d') at model.py:3; all_reduce over m, 40 bytes\n"
        "    sin_1 = sin(all_reduce_1)  # f32[2,5] P('d')\n"
        "    return (sin_1,)"
    )


def test_text_is_python_and_deterministic() -> None:
    builder = PlanBuilder(make_mesh({"m": 2}, runtime="virtual"))
    x = builder.input("x", (4, 3), P("m"))
    table = builder.constant(torch.arange(3.0))
    left, right = builder.call(aten.split.Tensor, (x, 2, 1), [((4, 2), P("m")), ((4, 1), P("m"))])
    scaled = builder.call(aten.mul.Tensor, (x, table), [((4, 3), P("m"))])
    plan = builder.plan(left, right, scaled)
    text = lowered(plan).as_text()
    assert text == lowered(plan).as_text()
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    assert [argument.arg for argument in function.args.args] == ["x"]
    assert "constant_0 = self.constant_0  # f32[3] P()" in text
    assert "split_1 = split(x, 2, 1)  # 2 tensors" in text


def test_long_calls_are_broken_into_lines() -> None:
    builder = PlanBuilder(make_mesh({"m": 2}, runtime="virtual"))
    xs = [builder.input(f"parameter_of_layer_{index}", (4,), P("m")) for index in range(20)]
    plan = builder.plan(*[builder.call(aten.mul.Tensor, (x, 0.5), [((4,), P("m"))], group=1) for x in xs])
    text = lowered(plan).as_text()
    ast.parse(text)
    assert max(len(line) for line in text.splitlines() if "return" not in line) <= 120
    assert "    foreach_mul_1 = foreach_mul(\n        [parameter_of_layer_0, parameter_of_layer_1," in text
    assert "parameter_of_layer_19],\n        0.5,\n    )  # 20 tensors" in text


def test_a_program_without_arguments() -> None:
    builder = PlanBuilder(make_mesh({"m": 2}, runtime="virtual"))
    full = builder.call(
        aten.full.default, ([3], 2.0), [((3,), P())], kwargs={"dtype": torch.float32, "device": torch.device("cpu")}
    )
    assert lowered(builder.plan(full)).as_text().splitlines()[1:] == [
        "def program():",
        "    full_1 = full([3], 2.0, dtype=torch.float32)  # f32[3] P()",
        "    return (full_1,)",
    ]


def test_uneven_programs_say_so() -> None:
    builder = PlanBuilder(make_mesh({"m": 2}, runtime="virtual"))
    x = builder.input("x", (5,), P("m"))
    text = lowered(builder.plan(builder.call(aten.neg.default, (x,), [((5,), P("m"))]))).as_text()
    assert text.splitlines()[0] == "# Mesh(m=2): the program of coordinate zero; shapes differ between ranks"
    assert "f32[3] P('m')" in text


@pytest.mark.parametrize(
    ("spec", "atoms", "expected"),
    [
        (P(), [(4, 6), (5,)], "P()"),
        (P("d"), [(4, 6), (5,)], "P('d')"),
        (P(None, "m"), [(4, 6), (5,)], "P((4·6@m))"),
        (P(("d", "m"), None, None), [(4, 6), (5,)], "P(('d', 'm'))"),
        (P("d", "m"), [(4, 6), (5,)], "P((4@d·6@m))"),
        (P(None, "m"), [(1, 6), (5,)], "P('m')"),
        (P(None, None, "m"), [(4, 6), (5,)], "P(None, 'm')"),
        (P(None, None, "m", partial={"d": "max"}), [(4, 6), (5,)], "P(None, 'm', partial={'d': 'max'})"),
    ],
)
def test_layouts(spec: P, atoms: list[tuple[int, ...]], expected: str) -> None:
    mesh = make_mesh({"d": 2, "m": 2}, runtime="virtual")
    meta = TensorMeta([size for group in atoms for size in group], torch.float32)
    assert str(Layout(DTensorSpec.make(mesh, spec, meta), tuple(atoms))) == expected
