import importlib
import inspect
import sys
from collections import namedtuple
from pathlib import Path

import optree
import pytest
import torch
import torch.nn.functional as F
from interpreter import evaluate

import spmd
from spmd.core.mesh import make_mesh, use_mesh
from spmd.core.placement import Replicate, Shard
from spmd.core.spec import P, TensorMeta
from spmd.errors import ShardingError, TraceError
from spmd.tracing.constrain import constrain, encode_spec, parse_spec, reshard
from spmd.tracing.running import is_tracing
from spmd.tracing.trace import trace

CLOSED = torch.tensor([1.0, -2.0, 3.0])
MODULE = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
META = TensorMeta((4, 3), torch.float32)


def assert_same(function, *args):
    """The traced program gives what the function gives."""
    traced = trace(function, args)
    want = optree.tree_leaves(function(*args))
    got = evaluate(traced.graph, optree.tree_leaves(args))
    assert len(want) == len(got)
    for expected, actual in zip(want, got, strict=True):
        torch.testing.assert_close(actual, expected)
    assert not any(operation.op._schema.is_mutable for operation in traced.graph.operations)
    return traced


def line_of(text):
    """The number of the only line of this file that ends with a comment `# text`."""
    found = [n for n, line in enumerate(inspect.getsource(inspect.getmodule(line_of)).splitlines(), 1)
             if line.endswith(f"# {text}")]  # fmt: skip
    (number,) = found
    return number


def operations(traced, name):
    return [operation for operation in traced.graph.operations if operation.op._schema.name == f"aten::{name}"]


def test_paths_trees_and_names():
    Pair = namedtuple("Pair", "left right")

    def step(params, batch, flag, nothing):
        return {"sum": params["w"] @ batch.left + batch.right, "rest": (None, [params["w"]] if flag else [])}

    x = torch.ones(3, 3)
    traced = trace(step, ({"w": x}, Pair(x, x), True, None), static_argnums=(2,))
    assert ("0['w']", "1.left", "1.right") == traced.input_paths
    assert ["params_w", "batch_left", "batch_right"] == [value.name for value in traced.graph.inputs]
    assert ("['rest'][1][0]", "['sum']") == traced.output_paths
    assert "step" == traced.name
    rebuilt = traced.out_tree.unflatten(["a", "b"])
    assert {"rest": (None, ["a"]), "sum": "b"} == rebuilt
    assert traced.graph.inputs[0] is traced.graph.outputs[0]


@pytest.mark.parametrize("leaf", [torch.ones(4, 3), torch.ones(4, 3, device="meta"), META])
def test_metas_stand_for_tensors(leaf):
    (result,) = trace(lambda x: x.sum(0), (leaf,)).graph.outputs
    assert TensorMeta((3,), torch.float32) == result.meta


def updates_in_place(x):
    h = x * 2
    h += 1
    h[0] = 5.0
    h[:, 1:].mul_(3)
    torch._foreach_add_([h], 1.0)
    h[h > 20] = 0.0
    return h, h.zero_() + x


def writes_to_what_comes_from_outside_only(x):
    mask = CLOSED > 0
    mask[0] = False
    shifted = CLOSED.sin()
    shifted.view(3, 1).mul_(2)
    return x * mask + shifted


def makes_its_own(x):
    table = torch.tensor([[1.0, 2.0, 3.0]])
    return x * table + torch.arange(3) + torch.zeros(3).fill_(2) + torch.eye(4, 3)


def branches(x):
    return torch.where(x > 0, x, x.exp() - 1), x.max(dim=1), x.split(2), x.chunk(2, dim=1), x.unbind()


@pytest.mark.parametrize(
    "function", [updates_in_place, writes_to_what_comes_from_outside_only, makes_its_own, branches, MODULE]
)
def test_values(function):
    with torch.no_grad():
        assert_same(function, torch.randn(4, 3))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def cubes(x):
    return (x**3 * CLOSED).sum()


@pytest.mark.parametrize(
    "function",
    [
        torch.func.grad(cubes),
        torch.func.grad_and_value(cubes),
        torch.func.grad(lambda x: torch.func.grad(cubes)(x).sum()),
        torch.func.vmap(torch.func.grad(cubes)),
        torch.func.jacrev(lambda x: x.sin() * CLOSED),
        torch.func.jacfwd(lambda x: x.sin() * CLOSED),
        torch.func.hessian(lambda x: cubes(x).sin()),
        lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
        lambda x: torch.func.vjp(torch.sin, x)[1](x),
        torch.func.grad(lambda x: Square.apply(x).sum()),
        torch.func.grad(lambda x: torch.func.grad(lambda y: (Square.apply(y) * y).sum())(x).sum()),
    ],
)
def test_transforms(function):
    assert_same(function, torch.randn(2, 3))


def test_a_module_through_functional_call():
    def loss(params, x, y):
        return F.mse_loss(torch.func.functional_call(MODULE, params, (x,)), y)

    params = {name: p.detach() for name, p in MODULE.named_parameters()}
    assert_same(torch.func.grad(loss), params, torch.randn(5, 3), torch.randn(5, 2))


def test_a_tensor_made_of_numbers_is_written_to():
    """As the length of transformers' static cache."""

    def count(x):
        length = torch.tensor(0, dtype=int)
        before = torch.arange(4) + length
        length.add_(3)
        other = torch.tensor([1.0, 2.0])
        other[0] = 5.0
        return x + length + before, other

    step = spmd.jit(count, P("data"), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))
    for _ in range(2):
        torch.testing.assert_close(spmd.full_tree(step(torch.arange(4.0))), count(torch.arange(4.0)))


def test_closed_over_tensors_are_constants_once():
    traced = trace(lambda x: (x * CLOSED + CLOSED.sum(), CLOSED), (META,))
    ((value, tensor),) = traced.graph.constants
    assert tensor is CLOSED
    assert value is traced.graph.outputs[1]


def test_is_tracing():
    seen = []
    trace(lambda x: seen.append(is_tracing()), (META,))
    assert [True] == seen
    assert not is_tracing()
    with pytest.raises(ZeroDivisionError):
        trace(lambda x: 1 / 0, (META,))
    assert not is_tracing()


def layer(w, x):
    h = F.linear(x, w)  # linear
    h = torch.tanh(
        h + 1,  # plus
    )
    return h.sum()  # sum


def test_sources_are_the_users_lines():
    traced = trace(layer, (TensorMeta((5, 3), torch.float32), META))
    lines = {operation.op._schema.name: operation.source.line for operation in traced.graph.operations}
    assert line_of("linear") == lines["aten::mm"]
    assert line_of("plus") == lines["aten::add"]
    assert line_of("sum") == lines["aten::sum"]
    (mm,) = operations(traced, "mm")
    assert (__file__, "h = F.linear(x, w)  # linear", False) == (mm.source.file, mm.source.code, mm.source.backward)


@pytest.mark.parametrize("order", [1, 2])
def test_backward_operators_have_the_line_of_their_forward(order):
    function = layer
    for _ in range(order):
        inner = function
        function = lambda w, x, inner=inner: torch.func.grad(lambda w: inner(w, x).sum())(w)  # noqa: E731
    traced = trace(function, (TensorMeta((5, 3), torch.float32), META))
    products = operations(traced, "mm")
    assert [False, *[True] * (len(products) - 1)] == [mm.source.backward for mm in products]
    assert {line_of("linear")} == {mm.source.line for mm in products}
    assert len(products) > order
    (tanh_backward, *_) = operations(traced, "tanh_backward")
    assert tanh_backward.source.backward


def writes_argument(x):
    y = x[0]
    y.add_(1)  # writes
    return x * 2


def writes_closed(x):
    CLOSED[0].add_(x[0, 0])  # writes closed
    return x


def asks_item(x):
    return x * x.sum().item()  # item


def asks_float(x):
    return x * float(x.sum())  # float


def asks_branch(x):
    return x if x.sum() > 0 else -x  # branch


def asks_nonzero(x):
    return x.nonzero()  # nonzero


def asks_mask(x):
    return x[x > 0]  # mask


def asks_unique(x):
    return torch.unique(x)  # unique


def asks_numpy(x):
    return torch.from_numpy(x.numpy())  # numpy


def asks_list(x):
    return x * x.tolist()[0]  # list


def draws(x):
    return F.dropout(x, 0.5) + torch.rand(4, generator=torch.Generator())  # draws


def calls_backward(x):
    x.sum().backward()  # backward
    return x


@pytest.mark.parametrize(
    ("function", "mark", "text"),
    [
        (writes_argument, "writes", "In-place write to argument 0['x'] f32[4,3]"),
        (writes_closed, "writes closed", "In-place write to closed-over tensor f32[3]"),
        (asks_item, "item", ".item() at"),
        (asks_float, "float", "float() or math at"),
        (asks_branch, "branch", "torch.where(condition, a, b)"),
        (asks_nonzero, "nonzero", "shape of the result of aten.nonzero.default"),
        (asks_mask, "mask", "shape of the result of aten.index.Tensor"),
        (asks_unique, "unique", "shape of the result of aten._unique2.default"),
        (asks_numpy, "numpy", ".numpy()"),
        (asks_list, "list", ".tolist()"),
        (draws, "draws", "aten.rand.generator"),
        (calls_backward, "backward", ".backward()"),
    ],
)
def test_what_cannot_be_traced_is_named_with_its_line(function, mark, text):
    with pytest.raises(TraceError) as error:
        trace(lambda tree: function(tree["x"]), ({"x": META},))
    assert text in str(error.value)
    assert f"at test_trace.py:{line_of(mark)} (`" in str(error.value)
    assert torch.equal(torch.tensor([1.0, -2.0, 3.0]), CLOSED)


@pytest.mark.parametrize("leaf", [len, object()], ids=["function", "object"])
def test_arguments_must_be_tensors_or_values(leaf):
    with pytest.raises(TraceError) as error:
        trace(lambda x, tree: x, (META, {"n": [leaf]}))
    assert f"Argument 1['n'][0] must be a tensor (got {type(leaf).__name__}" in str(error.value)


@pytest.mark.parametrize("leaf", [3, True, "relu", torch.float32])
def test_static_values_are_passed_unchanged(leaf):
    traced = trace(lambda x, tree: (x, tree["n"][0]), (META, {"n": [leaf]}))
    assert [(1, leaf)] == list(traced.values) and traced.input_paths == ("0",)


def test_results_must_be_tensors_or_values():
    with pytest.raises(TraceError) as error:
        trace(lambda x: (x, {"loss": len}), (META,))
    assert "Result[1]['loss'] must be a tensor or a number (got builtin_function_or_method" in str(error.value)


def test_errors_of_the_user_and_of_torch_pass_unchanged(caplog):
    with pytest.raises(RuntimeError, match=r"reduction dim|cannot be multiplied"):
        trace(lambda x: x @ x, (META,))
    with pytest.raises(KeyError, match="missing"):
        trace(lambda x: {}["missing"], (META,))
    assert [] == caplog.records


def test_nothing_is_drawn_without_dropout():
    q = torch.randn(2, 3, 4, 8)
    assert_same(lambda q: F.scaled_dot_product_attention(F.dropout(q, 0.0), q, q, is_causal=True), q)


SPECS = [P(), P("a"), P(None, "a"), P(("a", "b"), None, "c"), P("a", partial={"b": "sum", "c": "sum"})]


@pytest.mark.parametrize("spec", SPECS)
def test_spec_text_round_trip(spec):
    assert spec == parse_spec(encode_spec(spec))


def constraints(traced):
    return [
        (operation.op._schema.name.removeprefix("spmd::"), operation.args[1], operation.source.backward)
        for operation in traced.graph.operations
        if operation.op._schema.name.startswith("spmd::")
    ]


def test_the_cotangent_of_constrain_is_constrained_and_that_of_reshard_is_not():
    function = lambda x: (constrain(reshard(x.sin(), P("b")), P(None, "a")) ** 2).sum()  # noqa: E731
    traced = assert_same_inside(torch.func.grad(function), torch.randn(4, 3))
    assert [("reshard", "b", False), ("constrain", "|a", False), ("constrain", "|a", True)] == constraints(traced)


@pytest.mark.parametrize(("in_dim", "text"), [(0, "|a"), (1, "a"), (-1, "a")])
def test_the_mapped_dim_is_not_sharded(in_dim, text):
    function = torch.func.vmap(lambda x: constrain(x, P("a")).cos(), in_dims=in_dim)
    assert [("constrain", text, False)] == constraints(assert_same_inside(function, torch.randn(4, 3)))


def assert_same_inside(function, x):
    """As `assert_same`, for functions that can only be called while tracing: their constraints change no values."""
    with use_mesh(make_mesh({"a": 2, "b": 2}, runtime="virtual")):
        traced = trace(function, (x,))
    free = [op for op in traced.graph.operations if not op.op._schema.name.startswith("spmd::")]
    assert len(free) < len(traced.graph.operations)
    (got,) = evaluate(traced.graph, [x])
    want = {"cos": x.cos()}.get(free[0].op._schema.name.removeprefix("aten::"), 2 * x.sin() * x.cos())
    torch.testing.assert_close(got, want if got.shape == want.shape else want.T)
    return traced


def test_placements_are_specs_of_the_current_mesh():
    with use_mesh(make_mesh({"a": 2, "b": 2}, runtime="virtual")):
        traced = trace(lambda x: constrain(x, (Replicate(), Shard(1))), (META,))
    assert [("constrain", "|b", False)] == constraints(traced)


def test_constrain_refuses():
    with pytest.raises(ShardingError, match=r"plain tensor f32\[3\] outside of spmd.jit"):
        constrain(CLOSED, P("a"))
    for spec, text in (
        (P(None, None, "a"), r"constrain at .*test_trace.*f32\[4,3\]: .*names 3 dims but the tensor f32\[4,3\] has 2"),
        (P("z"), "Unknown mesh axis 'z'"),
        ("a", r"'a' is not a spec. Write P\('a'\)"),
        (None, r"None is not a spec. Write P\(\)"),
        ((Shard(2),), r"Shard\(2\) in \[Shard\(2\)\] shards a dim that the tensor f32\[4,3\] lacks"),
        ((Shard(0), Shard(1)), "Expected one placement for each of the 1 axes"),
    ):
        with use_mesh(make_mesh({"a": 2}, runtime="virtual")), pytest.raises(ShardingError, match=text):
            trace(lambda x, spec=spec: constrain(x, spec), (META,))
    with pytest.raises(ShardingError, match="takes a tensor"):
        constrain(3, P())


def test_out_of_a_dtype_that_torch_refuses():
    for function in (lambda x: torch.add(x, x, out=torch.empty(2, 3).long()), lambda x: torch.mm(x, x.T, out=OUT.T)):
        with pytest.raises(RuntimeError, match="dtype") as error:
            trace(function, (TensorMeta((2, 3), torch.float32),))
        assert any(entry.path == Path(__file__) for entry in error.traceback[1:])


OUT = torch.empty(2, 2).double()


def test_the_lines_of_a_file_that_was_edited_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "reloaded_layer.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for line in ("    return x.sin()  # first", "    return x.cosh()  # then"):
        file.write_text(f"def layer(x):\n{line}\n")
        importlib.invalidate_caches()
        sys.modules.pop(file.stem, None)
        graph = trace(importlib.import_module(file.stem).layer, (TensorMeta((2,), torch.float32),)).graph
        assert (source := graph.operations[0].source) is not None and source.code == line.strip()
    sys.modules.pop(file.stem)
