"""The order of calls when operations are joined into list operators."""

from __future__ import annotations

import torch

from spmd.core.spec import TensorMeta
from spmd.ir.graph import Operation, Value
from spmd.ir.list_schedule import schedule

aten = torch.ops.aten


def value(name: str) -> Value:
    return Value(name, TensorMeta((2,), torch.float32))


def test_random_operators_keep_their_order_around_a_list_operator() -> None:
    """The first draw waits for both elements of the list; the second one could run at once, and must not."""
    x, y, a, b, first, second = map(value, ("x", "y", "a", "b", "first", "second"))
    operations = (
        Operation(aten.exp.default, (x,), {}, (a,), group=1),
        Operation(aten.bernoulli.default, (a,), {}, (first,)),
        Operation(aten.bernoulli.default, (y,), {}, (second,)),
        Operation(aten.exp.default, (y,), {}, (b,), group=1),
    )
    calls = [(unit.op, [operation.tensors[0].name for operation in unit.operations]) for unit in schedule(operations)]
    assert [
        (aten._foreach_exp.default, ["a", "b"]),
        (aten.bernoulli.default, ["first"]),
        (aten.bernoulli.default, ["second"]),
    ] == calls
