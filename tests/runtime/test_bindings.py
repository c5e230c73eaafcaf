"""Torch's own functions in place of operators: they reach the same operators, or are not taken."""

import pytest
import torch
from torch.testing import assert_close

from spmd.core.spec import TensorMeta
from spmd.ir.graph import map_leaves
from spmd.runtime import bindings

aten = torch.ops.aten
X, Y, N = torch.arange(12.0).view(4, 3) - 5, torch.linspace(-1, 1, 12).view(4, 3), torch.tensor(2.0)


def callable_of(op, *args, **kwargs):
    meta = lambda leaf: TensorMeta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
    return bindings.callable_of(op, *map_leaves(meta, (args, kwargs)))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Tensor, (X, Y)),
        (aten.add.Tensor, (X, 2)),
        (aten.add.Scalar, (X, 2)),
        (aten.pow.Tensor_Scalar, (X, 2)),
        (aten.pow.Scalar, (2, X)),
        (aten.pow.Tensor_Tensor, (X, N)),
        (aten.clamp.Tensor, (X, N)),
        (aten.clamp.default, (X, None, 1)),
        (aten.sum.dim_IntList, (X, [0], True)),
        (aten.sum.default, (X,)),
        (aten.max.dim, (X, 1)),
        (aten.max.other, (X, Y)),
        (aten.view.default, (X, [2, 6])),
        (aten.reshape.default, (X, [12])),
        (aten.permute.default, (X, [1, 0])),
        (aten.split.Tensor, (X, 2)),
        (aten.split_with_sizes.default, (X, [1, 3])),
        (aten.stack.default, ([X, Y], 1)),
        (aten.index.Tensor, (X, [None, torch.tensor([0, 2])])),
        (aten.gelu.default, (X,)),
        (aten.native_layer_norm.default, (X, [3], None, None, 1e-5)),
        (aten._foreach_mul.Scalar, ([X, Y], 2.0)),
        (aten._foreach_mul.Tensor, ([X, Y], N)),
        (aten._foreach_mul.List, ([X, Y], [Y, X])),
        (aten.bitwise_and.Tensor, (X > 0, Y > 0)),
        (aten.nonzero.default, (X,)),
        (aten.linalg_inv_ex.default, (torch.eye(3),)),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_a_function_gives_what_the_operator_gives(op, args):
    assert_close(callable_of(op, *args)(*args), op(*args), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("op", "name"), [(aten.add.Tensor, "add"), (aten.gelu.default, "gelu"), (aten.view.default, "view")]
)
def test_functions_and_methods_are_found(op, name):
    args = {"add": (X, Y), "gelu": (X,), "view": (X, [12])}[name]
    assert callable_of(op, *args) is not op._op
    assert callable_of(op, *args).__name__ == name


def test_a_function_that_reaches_another_operator_is_not_taken(monkeypatch):
    class Wrong:
        mul = staticmethod(torch.add)
        div = staticmethod(lambda x, y: x / y + 0)
        neg = staticmethod(lambda x: x.abs())

    monkeypatch.setattr(bindings, "_FUNCTIONS", (Wrong,))
    bindings._find.cache_clear()
    try:
        for op, args in ((aten.mul.Tensor, (X, Y)), (aten.div.Tensor, (X, Y)), (aten.neg.default, (X,))):
            assert callable_of(op, *args) is op._op
    finally:
        bindings._find.cache_clear()


def test_what_would_take_memory_is_not_tried():
    assert callable_of(aten.zeros.default, [4, 3]) is aten.zeros.default._op
    on_cpu = {"device": torch.device("cpu")}
    assert callable_of(aten.zeros_like.default, X, **on_cpu) is aten.zeros_like.default._op


def test_functions_of_python_stay():
    assert callable_of(len, [X]) is len
