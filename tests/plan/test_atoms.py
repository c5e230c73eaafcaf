"""The refinement of dims into atoms, on small programs."""

import torch

from spmd.core.spec import TensorMeta
from spmd.ir.graph import Graph, Operation, Value
from spmd.plan.search.atoms import refine
from spmd.rules import RULES, find_rule

aten = torch.ops.aten


def value(name: str, *shape: int) -> Value:
    return Value(name, TensorMeta(shape, torch.float32))


def refined(graph: Graph) -> dict[str, tuple[tuple[int, ...], ...]]:
    factors = {}
    for operation in graph.operations:
        rule = find_rule(operation.op, RULES)
        assert rule is not None
        factors[operation] = rule.factorize(operation.call())
    return {value.name: atoms for value, atoms in refine(graph, factors).values.items()}


def linear(x: Value, w: Value, flat: Value, out: Value, result: Value) -> tuple[Operation, ...]:
    return (
        Operation(aten.view.default, (x, list(flat.meta.shape)), {}, (flat,)),
        Operation(aten.mm.default, (flat, w), {}, (out,)),
        Operation(aten.view.default, (out, list(result.meta.shape)), {}, (result,)),
    )


def test_a_flattened_linear_keeps_batch_and_sequence_apart() -> None:
    x, w = value("x", 4, 6, 8), value("w", 8, 10)
    flat, out, y = value("flat", 24, 8), value("out", 24, 10), value("y", 4, 6, 10)
    graph = Graph((x, w), (), linear(x, w, flat, out, y), (y,))
    assert refined(graph) == {
        "x": ((4,), (6,), (8,)),
        "w": ((8,), (10,)),
        "flat": ((4, 6), (8,)),
        "out": ((4, 6), (10,)),
        "y": ((4,), (6,), (10,)),
    }


def test_a_split_into_heads_reaches_the_weight_and_its_gradient() -> None:
    x, w = value("x", 6, 8), value("w", 8, 12)
    out, heads, transposed = value("out", 6, 12), value("heads", 6, 3, 4), value("xt", 8, 6)
    grad = value("grad", 8, 12)
    operations = (
        Operation(aten.mm.default, (x, w), {}, (out,)),
        Operation(aten.view.default, (out, [6, 3, 4]), {}, (heads,)),
        Operation(aten.permute.default, (x, [1, 0]), {}, (transposed,)),
        Operation(aten.mm.default, (transposed, out), {}, (grad,)),
    )
    atoms = refined(Graph((x, w), (), operations, (heads, grad)))
    assert atoms["w"] == ((8,), (3, 4))
    assert atoms["grad"] == ((8,), (3, 4))


def test_views_that_form_no_divisibility_chain_are_kept_apart() -> None:
    x, y, z = value("x", 24), value("y", 4, 6), value("z", 6, 4)
    operations = (
        Operation(aten.view.default, (x, [4, 6]), {}, (y,)),
        Operation(aten.view.default, (x, [6, 4]), {}, (z,)),
    )
    atoms = refined(Graph((x,), (), operations, (y, z)))
    assert atoms["y"] == ((4,), (6,))
    assert atoms["z"] == ((6,), (4,))
    assert atoms["x"] in (((4, 6),), ((6, 4),))
