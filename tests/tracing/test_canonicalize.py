import math

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreter import evaluate

from spmd.core.spec import TensorMeta
from spmd.ir.list_operators import element_operator, join_elements, split_lists
from spmd.tracing.canonicalize.canonicalize import PASSES, canonicalize, eliminate_dead, simplify
from spmd.tracing.canonicalize.decompositions import decompose_operations
from spmd.tracing.canonicalize.normal_forms import normalize
from spmd.tracing.trace import trace

aten = torch.ops.aten
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([1, 2, 0, 2])


def names(graph):
    return [str(operation.op).removeprefix("aten.") for operation in graph.operations]


def canonical(function, *args, decompose=None):
    """The canonical graph of a function, whose values are those of the function itself."""
    traced = trace(function, args)
    graph = canonicalize(traced.graph, decompose)
    leaves, want = optree.tree_leaves(args), optree.tree_leaves(function(*args))
    for program in (traced.graph, graph):
        got = evaluate(program, leaves)
        for expected, actual in zip(want, got, strict=True):
            torch.testing.assert_close(actual, expected, equal_nan=True)
    assert names(canonicalize(graph, decompose)) == names(graph), "canonical form is a fixpoint"
    return graph


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.clone().detach().contiguous(), []),
        (lambda x: x.float().to(torch.float32).view(4, 6).expand(4, 6)[:, :], []),
        (lambda x: x.t().t(), []),
        (lambda x: x.transpose(0, 1).permute(-1, 0), []),
        (lambda x: x.view(24).view(4, 6), []),
        (lambda x: x.view(2, 2, 6).reshape(-1, 6).unsqueeze(1).squeeze(1), []),
        (lambda x: x.t(), ["permute.default"]),
        (lambda x: x.transpose(-1, 0), ["permute.default"]),
        (lambda x: x.view(2, 2, 6).permute(2, 0, 1).transpose(0, 1), ["view.default", "permute.default"]),
        (lambda x: x.view(24).unsqueeze(0), ["view.default"]),
        (lambda x: x.view(2, 2, 6).view(2, 12), ["view.default"]),
        (lambda x: x.view(2, 2, 6).view(24), ["view.default", "view.default"]),
        (lambda x: x.sin() * x.sin(), ["sin.default", "mul.Tensor"]),
        (lambda x: (x.cos(), x + 1)[1], ["add.Tensor"]),
        (lambda x: torch.stack([x, x.sin()], -1).unbind(2)[1], ["sin.default"]),
        (lambda x: torch.stack([x, x.sin()]).unbind(1)[1], ["sin.default", "stack.default", "unbind.int"]),
        (lambda x: torch.ones_like(x) + x.new_zeros(6), ["full.default"]),
        (
            lambda x: torch.full_like(x, 2).add_(torch.scalar_tensor(2.0)),
            ["full.default"],
        ),
        (lambda x: torch.empty_like(x).fill_(3.0), ["full.default"]),
        (lambda x: x.double(), ["_to_copy.default"]),
        (lambda x: x.mean(), ["sum.dim_IntList", "div.Tensor"]),
        (lambda x: torch.mul(x, 2.0) / 3, ["mul.Tensor", "div.Tensor"]),
        (lambda x: x.softmax(-1), ["_softmax.default"]),
    ],
)
def test_canonical_operators(function, expected):
    assert expected == names(canonical(function, X))


def test_dims_and_sizes_are_explicit():
    graph = canonical(lambda x: torch.stack([x.reshape(-1, 3).sum(-1), x.softmax(-1).reshape(8, -1)[:, -1]], -1), X)
    arguments = {name: operation.args for name, operation in zip(names(graph), graph.operations, strict=True)}
    assert [8, 3] == arguments["view.default"][1]
    assert [1] == arguments["sum.dim_IntList"][1]
    assert 1 == arguments["_softmax.default"][1]
    assert 1 == arguments["stack.default"][1]


def test_full_has_shape_value_and_dtype():
    (operation,) = canonical(lambda x: torch.ones_like(x, dtype=torch.float64), X).operations
    assert ([4, 6], 1) == operation.args
    assert {"dtype": torch.float64} == operation.kwargs


def test_numbers_of_different_types_are_different():
    graph = canonical(lambda x: (x.int() + 1, x.int() + 1.0, x * 0.0, x * -0.0), X)
    assert 5 == len(graph.operations)


def test_a_view_that_loses_no_dim_is_joined_and_the_first_stays_for_others():
    graph = canonical(lambda x: (x.view(2, 2, 6).cos(), x.view(2, 2, 6).view(2, 2, 2, 3)), X)
    views = [operation for operation in graph.operations if operation.op is aten.view.default]
    assert [graph.inputs[0]] * 2 == [view.args[0] for view in views]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [None, -1, (0, 1), ()])
def test_means_and_variances(dtype, dim):
    def function(x):
        return x.mean(dim), x.var(dim, keepdim=True), x.std(dim, correction=0), torch.var_mean(x, dim)

    graph = canonical(function, (X * 100).to(dtype))
    assert not {"mean.dim", "mean.default", "var.correction", "std.correction"} & set(names(graph))


def test_a_mean_in_half_precision_does_not_overflow():
    canonical(lambda x: x.mean(), torch.full((100,), 60000.0, dtype=torch.float16))


def test_the_mean_of_nothing_is_nan():
    canonical(lambda x: x.mean(), torch.ones(0, 3))


LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.5),
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.7),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), weight=y.abs()),
    "bce_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "soft_margin": F.soft_margin_loss,
    "soft_labels": lambda x, y: F.cross_entropy(x, y.softmax(-1)),
    "labels": lambda x, y: F.cross_entropy(x, LABELS),
    "ignore": lambda x, y: F.cross_entropy(x, LABELS, ignore_index=2),
    "all_ignored": lambda x, y: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64), ignore_index=0),
    "weight": lambda x, y: F.cross_entropy(x, LABELS, weight=y[0].abs(), ignore_index=0),
    "smoothing": lambda x, y: F.cross_entropy(x, LABELS, label_smoothing=0.1),
    "image": lambda x, y: F.cross_entropy(x.view(2, 3, 2, 2), (y.view(2, 3, 2, 2)[:, 0] > 0).long(), ignore_index=0),
    "unbatched": lambda x, y: F.cross_entropy(x[0], LABELS[0]),
    "sum": lambda x, y: F.cross_entropy(x, LABELS, reduction="sum"),
    "none": lambda x, y: F.cross_entropy(x, LABELS, reduction="none").sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_become_sums(name):
    graph = canonical(torch.func.grad_and_value(LOSSES[name]), X, Y)
    for operation in graph.operations:
        call = operation.call()
        reductions = [a.name for a in operation.op._schema.arguments if a.name == "reduction"]
        assert 1 not in [call.argument(name) for name in reductions], "no mean is left"
        assert "mean" not in str(operation.op)


def test_copies_to_channels_last_stay_and_others_do_not():
    def function(x):
        x = x.contiguous(memory_format=torch.channels_last)
        return x.to(torch.float64, memory_format=torch.channels_last).transpose(1, 2).contiguous()

    graph = canonical(function, ATTENDED)
    assert ["clone.default", "_to_copy.default", "permute.default"] == names(graph)


ATTENDED = torch.randn(2, 3, 4, 5)


def test_decompose_what_has_no_rule():
    needs = lambda op: op in (aten._softmax.default, aten.addmm.default, aten.gelu.default)  # noqa: E731
    graph = canonical(lambda x: F.gelu(torch.addmm(x, x, Y.T @ Y).softmax(1)), X, decompose=needs)
    assert not {"_softmax.default", "addmm.default", "gelu.default"} & set(names(graph))
    assert all(operation.source is not None for operation in graph.operations)


def test_what_has_no_decomposition_stays():
    graph = trace(lambda x: x.sin(), (X,)).graph
    assert names(graph) == names(decompose_operations(graph, lambda op: True))


def test_passes_keep_sources():
    graph = canonical(lambda x: F.mse_loss(x, x.mean(0).expand(4, 6)), X)
    assert {"test_canonicalize.py"} == {str(operation.source).split(":")[0] for operation in graph.operations}


PARAMETERS = [torch.rand(2, 3) + 0.5, torch.rand(4) + 0.5, torch.rand(()) + 0.5]
OTHERS = [parameter.flip(-1) if parameter.ndim else parameter * 2 for parameter in PARAMETERS]
LIST_CALLS = {
    "add.List": lambda a, b: torch._foreach_add(a, b, alpha=0.5),
    "add.Scalar": lambda a, b: torch._foreach_add(a, 2.0),
    "add.ScalarList": lambda a, b: torch._foreach_add(a, [1.0, 2.0, 3.0]),
    "add.Tensor": lambda a, b: torch._foreach_add(a, b[2], alpha=2),
    "sub.List": lambda a, b: torch._foreach_sub(a, b),
    "mul.List": lambda a, b: torch._foreach_mul(a, b),
    "mul.Scalar": lambda a, b: torch._foreach_mul(a, 0.9),
    "mul.Tensor": lambda a, b: torch._foreach_mul(a, b[2]),
    "div.ScalarList": lambda a, b: torch._foreach_div(a, [1.0, 2.0, 3.0]),
    "div.List": lambda a, b: torch._foreach_div(a, b),
    "addcmul.Scalar": lambda a, b: torch._foreach_addcmul(a, b, b, 0.1),
    "addcdiv.Scalar": lambda a, b: torch._foreach_addcdiv(a, b, b, value=-0.1),
    "addcdiv.ScalarList": lambda a, b: torch._foreach_addcdiv(a, a, b, [1.0, 2.0, 3.0]),
    "lerp.Scalar": lambda a, b: torch._foreach_lerp(a, b, 0.1),
    "lerp.List": lambda a, b: torch._foreach_lerp(a, b, a),
    "sqrt.default": lambda a, b: torch._foreach_sqrt(a),
    "neg.default": lambda a, b: torch._foreach_neg(a),
    "reciprocal.default": lambda a, b: torch._foreach_reciprocal(a),
    "pow.Scalar": lambda a, b: torch._foreach_pow(a, 2.0),
    "pow.List": lambda a, b: torch._foreach_pow(a, b),
    "pow.ScalarAndTensor": lambda a, b: torch._foreach_pow(0.9, a),
    "maximum.List": lambda a, b: torch._foreach_maximum(a, b),
    "maximum.Scalar": lambda a, b: torch._foreach_maximum(a, 0.8),
    "minimum.Scalar": lambda a, b: torch._foreach_minimum(a, 0.8),
    "clamp_min.Scalar": lambda a, b: torch._foreach_clamp_min(a, 0.8),
    "clamp_max.List": lambda a, b: torch._foreach_clamp_max(a, b),
    "norm.Scalar": lambda a, b: torch._foreach_norm(a, 2),
}


@pytest.mark.parametrize("name", LIST_CALLS)
def test_list_operators_split_and_join(name):
    traced = trace(LIST_CALLS[name], (PARAMETERS, OTHERS)).graph
    assert [f"_foreach_{name}"] == names(traced)
    graph = canonical(LIST_CALLS[name], PARAMETERS, OTHERS)
    assert 3 == len(graph.operations)
    assert 1 == len({operation.group for operation in graph.operations}) and graph.operations[0].group is not None
    op, args, kwargs = join_elements(graph.operations)
    assert element_operator(op) is graph.operations[0].op
    values = dict(zip(graph.inputs, [*PARAMETERS, *OTHERS], strict=True))
    concrete = optree.tree_map(lambda leaf: values.get(leaf, leaf), (list(args), kwargs))
    got = op(*concrete[0], **concrete[1])
    for expected, actual in zip(LIST_CALLS[name](PARAMETERS, OTHERS), got, strict=True):
        torch.testing.assert_close(actual, expected)


def test_elements_that_differ_do_not_join():
    graph = canonicalize(trace(lambda a: (a[0] + 1, a[1].sin(), a[1] + a[1]), (PARAMETERS,)).graph)
    assert join_elements(graph.operations[:2]) is None
    assert join_elements((graph.operations[0], graph.operations[2])) is None


def test_groups_stay_apart():
    graph = split_lists(trace(lambda a: [torch._foreach_add(torch._foreach_neg(a), 1.0)], (PARAMETERS,)).graph)
    assert [1, 1, 1, 2, 2, 2] == [operation.group for operation in graph.operations]


def attention_block(p, x):
    b, s, d = x.shape
    h = F.layer_norm(x, (d,), p["scale"], p["shift"])
    q, k, v = (F.linear(h, p[name]).view(b, s, 2, d // 2).transpose(1, 2) for name in ("q", "k", "v"))
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
    return x + F.linear(F.gelu(F.linear(x, p["up"]), approximate="tanh"), p["down"])


def adam_step(p, m, v, step, tokens, targets):
    def loss(p):
        x = F.embedding(tokens, p["tokens"]) + p["positions"][: tokens.shape[1]]
        logits = F.linear(attention_block(p, x), p["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)

    grads, value = torch.func.grad_and_value(loss)(p)
    params, m, v, g = map(optree.tree_leaves, (p, m, v, grads))
    step = step + 1
    m = torch._foreach_lerp(m, g, 0.1)
    v = torch._foreach_addcmul(torch._foreach_mul(v, 0.99), g, g, 0.01)
    scale = torch._foreach_div(torch._foreach_sqrt(v), (1 - 0.99**step).sqrt())
    torch._foreach_add_(scale, 1e-3)
    new = torch._foreach_addcdiv(params, torch._foreach_div(m, 1 - 0.9**step), scale, -0.01)
    return new, m, v, step, value


def test_a_training_step_with_adam():
    generator = torch.Generator().manual_seed(0)
    shapes = {"tokens": (11, 8), "positions": (7, 8), "scale": (8,), "shift": (8,), "q": (8, 8), "k": (8, 8),
              "v": (8, 8), "up": (32, 8), "down": (8, 32)}  # fmt: skip
    p = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    tokens, targets = torch.randint(11, (2, 3, 5), generator=generator)
    m, v = ({name: x * 0 for name, x in p.items()} for _ in range(2))
    graph = canonical(lambda *a: adam_step(*a), p, m, v, torch.tensor(3.0), tokens, targets)
    kinds = set(names(graph))
    assert {"_scaled_dot_product_flash_attention_for_cpu.default", "native_layer_norm_backward.default"} <= kinds
    assert not {kind for kind in kinds if kind.split(".")[0] in ("t", "_unsafe_view", "transpose", "detach", "clone")}
    assert {operation.group is None for operation in graph.operations} == {True, False}


UNARY = [torch.sin, torch.tanh, lambda x: x * 2, lambda x: x + 1.0, torch.clone, lambda x: x.detach() - 0.5]
SHAPED = [
    lambda x: x.transpose(0, -1), lambda x: x.reshape(-1), lambda x: x.unsqueeze(0), lambda x: x.squeeze(),
    lambda x: x.flatten(), lambda x: x.reshape(math.prod(x.shape) // x.shape[-1], -1), lambda x: x.mean(-1),
    lambda x: x.sum(0, keepdim=True), lambda x: x[..., :1], lambda x: x.softmax(-1), lambda x: x.expand(2, *x.shape),
    lambda x: x.movedim(0, -1), lambda x: torch.cat([x, x], 0), lambda x: x.view_as(x),
    lambda x: x.var(0, correction=0),
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(UNARY + SHAPED), min_size=1, max_size=8),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.booleans(),
)
@example([SHAPED[-1]], [1], True)
def test_random_programs(steps, shape, differentiate):
    def function(x):
        seen = x.sum() * 0
        for step in steps:
            x = step(x) if x.ndim else x.sin()
            seen = seen + x.mean()
        return seen

    x = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).reshape(shape)
    canonical(torch.func.grad(function) if differentiate else function, x)


def test_passes_are_pure():
    graph = trace(lambda x: x.t().t() + x.mean(), (TensorMeta((3, 3), torch.float32),)).graph
    before = str(graph)
    for run in (*PASSES, normalize, simplify, eliminate_dead):
        run(graph)
    assert before == str(graph)


@pytest.mark.parametrize(
    ("function", "name", "dim"),
    [
        (lambda x: x.select(-1, 1).sin().sum(), "select_backward", 2),
        (lambda x: x.unfold(-1, 2, 1).sin().sum(), "unfold_backward", 2),
        (lambda x: x[..., 1:].sin().sum(), "slice_backward", 2),
    ],
)
def test_dims_of_backward_operators_count_those_of_their_results(function, name, dim):
    graph = canonicalize(trace(torch.func.grad(function), (torch.rand(3, 3, 3),)).graph)
    (operation,) = [operation for operation in graph.operations if name in str(operation.op)]
    assert dim == operation.args[2]


IMAGE = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
KERNEL = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
PAD = "constant_pad_nd.default"


def gradients(function):
    return lambda *args: torch.func.grad(lambda *args: function(*args).square().sum(), argnums=(0, 1))(*args)


@pytest.mark.parametrize(
    ("function", "pads", "in_gradients"),
    [
        (lambda x, w: F.conv2d(F.pad(x, (1, 1, 2, 2)), w), 0, 0),
        (lambda x, w: F.conv2d(F.pad(x, (1, 1)), w, padding=1, stride=2), 0, 0),
        (lambda x, w: F.conv1d(F.pad(x[:, :, 0], (2, 2)), w[..., 0]), 0, 0),
        (lambda x, w: F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2) * w.sum(), 0, 0),
        (lambda x, w: F.local_response_norm(x, 3) * w.sum(), 0, 0),
        (lambda x, w: F.avg_pool2d(F.pad(x, (2, 2)), 3, 2) * w.sum(), 1, 2),
        (lambda x, w: F.avg_pool2d(F.pad(x, (1, 1)), 3, 2, ceil_mode=True) * w.sum(), 1, 2),
        (lambda x, w: F.avg_pool2d(F.pad(x, (1, 1)), 3, 2, count_include_pad=False) * w.sum(), 1, 2),
        (lambda x, w: F.conv2d(F.pad(x, (2, 0)), w), 1, 2),
        (lambda x, w: F.conv2d(F.pad(x, (1, 1), value=1.0), w), 1, 2),
        (lambda x, w: F.conv2d(F.pad(x, (-1, -1)), w), 1, 2),
        (lambda x, w: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), w), 0, 0),
        (lambda x, w: F.conv2d(F.pad(x, (0, 0, 0, 0, 1, 1)), F.pad(w, (0, 0, 0, 0, 1, 1))), 2, 4),
        (lambda x, w: F.conv_transpose2d(F.pad(x, (1, 1)), w.transpose(0, 1)), 1, 2),
        (lambda x, w: (lambda x: F.conv2d(x, w).sum() + x.sin().sum())(F.pad(x, (1, 1))), 1, 2),
    ],
)
def test_pads_of_convolutions_are_their_padding(function, pads, in_gradients):
    assert pads == names(canonical(function, IMAGE, KERNEL)).count(PAD)
    assert in_gradients == names(canonical(gradients(function), IMAGE, KERNEL)).count(PAD)
