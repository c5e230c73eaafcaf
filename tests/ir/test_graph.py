import pytest
import torch
from interpreter import evaluate

from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.ir.graph import Graph, Operation, Value, iterate_leaves, map_leaves
from spmd.ir.source import Source

aten = torch.ops.aten
META = TensorMeta((2, 3), torch.float32)


def value(name):
    return Value(name, META)


def test_leaves_keep_their_containers():
    tree = (1, [2, {"a": 3}], ())
    assert (2, [3, {"a": 4}], ()) == map_leaves(lambda leaf: leaf + 1, tree)
    assert [1, 2, 3] == list(iterate_leaves(tree))


def test_operands_and_call_see_tensors_inside_lists():
    x, y, z = value("x"), value("y"), value("z")
    operation = Operation(aten.cat.default, ([x, y, x], 1), {}, (z,))
    assert (x, y, x) == operation.operands
    assert ([META, META, META], 1) == operation.call().args
    assert "%z: f32[2,3] = aten.cat.default(['%x', '%y', '%x'], 1)" == repr(operation)


def test_results_that_are_none_are_no_tensors():
    x = value("x")
    assert (x,) == Operation(aten.relu.default, (x,), {}, (None, x)).tensors


def test_source_names_file_and_line():
    assert "model.py:7" == str(Source("models/model.py", 7))
    assert "model.py:7 (backward)" == str(Source("models/model.py", 7, backward=True))


X, Y = value("x"), value("y")
DOUBLE = Operation(aten.mul.Tensor, (X, 2), {}, (Y,))


def test_evaluate_runs_a_graph():
    graph = Graph((X,), (), (DOUBLE,), (Y, X)).verify()
    x = torch.arange(6.0).reshape(2, 3)
    assert all(torch.equal(want, got) for want, got in zip((x * 2, x), evaluate(graph, [x]), strict=True))


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (Graph((), (), (DOUBLE,), (Y,)), "%x: f32[2,3] is used before it is defined"),
        (Graph((X,), (), (DOUBLE, DOUBLE), (Y,)), "%y: f32[2,3] is defined twice"),
        (Graph((X, X), (), (), (X,)), "%x: f32[2,3] is defined twice"),
        (Graph((X,), (), (), (Y,)), "Output %y: f32[2,3] is not defined"),
    ],
)
def test_verify_refuses(graph, text):
    with pytest.raises(TraceError) as error:
        graph.verify()
    assert text in str(error.value)
