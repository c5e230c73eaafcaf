"""Operators on DTensors outside of `spmd.jit`, against the same on plain tensors."""

from __future__ import annotations

import copy
import gc
import io
import itertools
from collections.abc import Callable
from typing import Any

import numpy
import optree
import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import P
from spmd.api.eager import operator_cache
from spmd.errors import MeshError, ShardingError, TraceError

MESH = spmd.make_mesh({"data": 2, "model": 3}, runtime="virtual")
SPECS = [P(), P("data"), P(None, "model"), P(("model", "data")), P("data", "model"), P(partial={"data": "sum"})]


def whole(tree: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, spmd.DTensor) else leaf, tree)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(whole(actual), expected, rtol=1e-5, atol=1e-6)


OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda x: x + 1,
    "number first": lambda x: 1 - x,
    "comparison": lambda x: x > 0.5,
    "0-d tensors": lambda x: torch.tensor(2.0) * x + torch.tensor(1),
    "mm": lambda x: x @ x.T,
    "chain": lambda x: torch.relu(x @ x.mT).softmax(-1).sum(),
    "reductions": lambda x: (x.sum(0), x.mean(), x.amax(1), x.std(), x.argmax(-1), x.norm()),
    "partial times a number": lambda x: (x.sum(0) * 2 + 1, x.sum() * x.sum()),
    "item": lambda x: x[0],
    "slices": lambda x: x[1:4, ::2],
    "positions": lambda x: x[torch.tensor(1)],
    "iteration": lambda x: list(x),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "cat": lambda x: torch.cat([x, x.flip(0)]),
    "split": lambda x: x.split(2),
    "reshape": lambda x: x.reshape(7, 5).unsqueeze(0),
    "foreach": lambda x: torch._foreach_mul([x, x + 1], 3.0),
    "sort": lambda x: x.sort(0),
    "like": lambda x: (torch.zeros_like(x), torch.full_like(x, 2), x.new_zeros(3)),
    "layer_norm": lambda x: F.layer_norm(x, (7,)),
    "cumsum": lambda x: x.cumsum(0),
    "casts": lambda x: (x.double(), x.to(torch.int64), x.bool()),
    "clone": lambda x: x.clone(),
    "linalg": lambda x: torch.linalg.svdvals(x),
    "vmap": lambda x: torch.func.vmap(lambda row: row.sin() / row.square().sum())(x),
    "grad": lambda x: torch.func.grad(lambda x: (x @ x.mT).sin().sum())(x),
    "jvp": lambda x: torch.func.jvp(lambda x: (x @ x.mT).sin(), (x,), (x.cos(),)),
    "vjp": lambda x: torch.func.vjp(torch.tanh, x)[1](x),
    "linearize": lambda x: torch.func.linearize(lambda x: (x @ x.mT).sin(), x)[1](x.cos()),
    "hessian": lambda x: torch.func.hessian(lambda x: x.sin().prod())(x[0]),
    "jacrev": lambda x: torch.func.jacrev(torch.sin)(x[0]),
    "jacfwd": lambda x: torch.func.jacfwd(lambda x: x.cumsum(0))(x[0]),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own forward-mode differentiation
@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str, spec: P) -> None:
    value = torch.rand(5, 7) + 0.1
    assert_same(OPERATORS[name](spmd.distribute(value, spec, MESH)), OPERATORS[name](value))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_known_call_with_other_numbers(spec: P) -> None:
    value = torch.rand(5, 7) + 0.1
    for number in (2, 3, 0, -1.5, 0.5, -0.0, 1.0):

        def compute(x: torch.Tensor, number: Any = number) -> Any:
            listed = torch._foreach_add([x, x], [number * 1.0, 3.0])
            torch._foreach_addcmul_(listed, [x, x], listed, [number * 2.0, 1.0])
            y = x.clone().sub_(x, alpha=number).clamp_(min=number)
            return (
                x + number,
                number - x,
                x * number,
                x.pow(number),
                x.sum(0) * number,
                x.norm(number),
                listed,
                y,
                x == number,
            )

        assert_same(compute(spmd.distribute(value, spec, MESH)), compute(value))


def write_to_itself(x: torch.Tensor) -> Any:
    x.add_(1).mul_(x)
    x[0] = 3.0
    x[:, 1:3] -= 2
    x.t()[2].fill_(7)
    x.view(-1)[4:9].zero_()
    x.detach().add_(1)
    x.masked_fill_(x > 6, 0.5)
    return x


def write_through_views(x: torch.Tensor) -> Any:
    row = x[1]
    row.mul_(2)
    column = x[:, 0]
    column.sub_(row.max())
    return x, column


def write_lists(x: torch.Tensor) -> Any:
    y = x * 2
    torch._foreach_add_([x, y], [y, y])
    torch._foreach_mul_([x[0], x[2]], 3.0)
    return x, y


def write_results(x: torch.Tensor) -> Any:
    y, top, where = torch.empty_like(x), x.new_empty(5, 2), torch.empty_like(x[:, :2], dtype=torch.int64)
    torch.add(x, 1, out=y)
    torch.topk(x, 2, out=(top, where))
    return y, top, where


def write_statistics(x: torch.Tensor) -> Any:
    mean, var = x.sum(0) * 0, x.sum(0) * 0 + 1
    return F.batch_norm(x, mean, var, training=True), mean, var


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize(
    "function", [write_to_itself, write_through_views, write_lists, write_results, write_statistics]
)
def test_writes(function: Callable[..., Any], spec: P) -> None:
    value = torch.rand(5, 7)
    placed = spmd.distribute(value, spec, MESH)
    before = placed.spec
    assert_same(function(placed), function(value))
    assert placed.spec == before


def test_writes_reach_no_other_value() -> None:
    x = spmd.distribute(torch.ones(4), P("data"), MESH)
    results = spmd.jit(lambda x: (x, x), P("data"), P("data"), mesh=MESH)(x)
    held = [shard.clone() for shard in x.shards]
    results[0].add_(1)
    assert_same((x, results[1]), (torch.ones(4), torch.ones(4)))
    assert_same(results[0], torch.full((4,), 2.0))
    x.zero_()
    assert all(torch.equal(a, torch.ones_like(a)) for a in held)


def test_a_view_from_before_a_write_cannot_be_read() -> None:
    x = spmd.distribute(torch.ones(4), P("data"), MESH)
    view = x[1:]
    x.add_(1)
    assert repr(view) == "DTensor(f32[3] P('data') on Mesh(data=2, model=3), a view from before a write)"
    with pytest.raises(
        ShardingError, match=r"was read at .*, after the tensor that it is a view of was written to, at"
    ):
        view + 1


def test_mixing() -> None:
    x, plain = spmd.distribute(torch.ones(4), P("data"), MESH), torch.arange(4.0)
    with pytest.raises(
        ShardingError, match=r"aten.add.Tensor at test_eager.py.* plain tensor f32\[4\] beside a DTensor"
    ):
        x + plain
    with spmd.implicit_replication():
        assert_same((x + plain, plain * x), (torch.ones(4) + plain, plain))
    other = spmd.distribute(torch.ones(4), P("data"), spmd.make_mesh({"data": 2}, runtime="virtual"))
    with pytest.raises(MeshError, match=r"has operands on Mesh\(data=2, model=3\) and on Mesh\(data=2\)"):
        x + other


def test_a_dtensor_that_is_closed_over_is_refused() -> None:
    x = spmd.distribute(torch.ones(4), P("data"), MESH)
    with pytest.raises(TraceError, match="closes over"):
        spmd.jit(lambda y: y + x, P(), P(), mesh=MESH)(torch.ones(4))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_reading(spec: P) -> None:
    value = torch.rand(5, 7)
    x = spmd.distribute(value, spec, MESH)
    assert torch.allclose(torch.tensor(x.tolist()), value)
    assert torch.allclose(torch.from_numpy(x.numpy()), value)
    total = x.sum()
    assert float(total) == pytest.approx(float(value.sum())) == x[:, 2:].sum().item() + x[:, :2].sum().item()
    assert bool(total > 0) and f"{total:.2f}" == f"{value.sum():.2f}" and int(x.argmax()) == int(value.argmax())
    assert torch.equal(x, x.clone()) and not torch.equal(x, x + 1)
    torch.testing.assert_close(x, x.clone())
    torch.testing.assert_close({"x": x}, {"x": value})
    with pytest.raises(AssertionError, match=r"Mismatched elements: 5 / 35"):
        torch.testing.assert_close(value + torch.eye(5, 7), x)


LISTS = [[1, 2], (slice(None), [0, 2]), ([0, 1], [1, 2]), ([[0], [1]], [2, 3]), [True, False, True, False, True]]


@pytest.mark.parametrize("index", [*LISTS, numpy.array([3, 0]), (..., numpy.int64(1)), (numpy.array([True] * 5), 2)])
def test_indices_may_be_lists_and_arrays(index: Any) -> None:
    value = torch.rand(5, 7)
    x = spmd.distribute(value, P("data", "model"), MESH)
    torch.testing.assert_close(x[index], value[index])
    x, value = x.clone(), value.clone()
    x[index] = 2.0
    value[index] = 2.0
    torch.testing.assert_close(x, value)


def test_a_gradient_is_not_read_by_accident() -> None:
    x = spmd.distribute(torch.ones(2), P(), MESH).requires_grad_()
    with pytest.raises(RuntimeError, match=r"Use .detach\(\).numpy\(\)"):
        x.numpy()
    assert [1.0, 1.0] == x.detach().numpy().tolist() == list(x.numpy(force=True))


@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P()], ids=repr)
def test_backward(spec: P) -> None:
    value, weight = torch.rand(5, 7), torch.rand(7, 3)

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        x.requires_grad_(), w.requires_grad_()
        seen: list[torch.Tensor] = []
        hidden = torch.tanh(x @ w)
        hidden.register_hook(seen.append)
        hidden = hidden * 2
        hidden[0].mul_(3)
        loss = hidden.square().mean()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + first.square().sum()).backward()
        return x.grad, w.grad, first.detach(), seen[0].detach()

    placed = (spmd.distribute(value, spec, MESH), spmd.distribute(weight, P(None, "model"), MESH))
    assert_same(run(*placed), run(value.clone(), weight.clone()))


def test_random_numbers_are_those_of_one_device() -> None:
    value = torch.ones(5, 7)

    def draw(x: torch.Tensor) -> Any:
        torch.manual_seed(3)
        return torch.rand_like(x), F.dropout(x, 0.4), torch.bernoulli(x * 0.5), x.clone().normal_(), torch.randn_like(x)

    assert_same(draw(spmd.distribute(value, P("data", "model"), MESH)), draw(value))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_strides_are_those_of_one_device(spec: P) -> None:
    """Random operators draw in the order of memory, and `as_strided` reads in it."""

    def compute(x: torch.Tensor) -> Any:
        torch.manual_seed(3)
        y, z = x.t() * 2, x[:, ::2]
        drawn = [torch.randn_like(v) for v in (y, z, x.expand(2, 5, 7), y.contiguous(), (x.t() + 1).detach())]
        w = x.t().clone()
        w[1:].bernoulli_(0.5)
        return drawn, F.dropout(y, 0.5), w, y.as_strided((12,), (1,)), z.reshape(-1), x.unsqueeze(0).transpose(1, 2)

    value = torch.rand(5, 7)
    found, expected = compute(spmd.distribute(value, spec, MESH)), compute(value)
    assert_same(found, expected)
    for actual, wanted in zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True):
        assert actual.stride() == wanted.stride()
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)view"):
        spmd.distribute(value, spec, MESH).t().view(-1)


def placed_module(module: torch.nn.Module, specs: dict[str, P]) -> torch.nn.Module:
    """The module with DTensors for parameters."""
    for path, parameter in list(module.named_parameters()):
        owner, _, name = path.rpartition(".")
        placed = spmd.distribute(parameter.detach(), specs.get(path, P()), MESH)
        setattr(module.get_submodule(owner), name, torch.nn.Parameter(placed))
    return module


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "adamw of lists": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "adam, fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stock_module_and_a_stock_optimizer(name: str) -> None:
    def module() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(7, 6), torch.nn.LayerNorm(6), torch.nn.GELU(), torch.nn.Linear(6, 2))

    def train(model: torch.nn.Module, x: torch.Tensor) -> Any:
        optimizer, losses = OPTIMIZERS[name](model.parameters()), []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, [parameter.detach() for parameter in model.parameters()]

    x = torch.rand(5, 7)
    sharded = placed_module(module(), {"0.weight": P("model"), "0.bias": P("model"), "3.weight": P(None, "model")})
    specs = [parameter.spec for parameter in sharded.parameters()]
    assert_same(train(sharded, spmd.distribute(x, P("data"), MESH)), train(module(), x))
    assert specs == [parameter.spec for parameter in sharded.parameters()]


@pytest.mark.parametrize("foreach", [False, True])
def test_parameters_on_several_meshes(foreach: bool) -> None:
    other = spmd.make_mesh({"data": 4}, runtime="virtual")
    values = [torch.rand(5, 7), torch.rand(4), torch.rand(3, 2), torch.rand(6)]

    def train(parameters: list[torch.Tensor]) -> Any:
        parameters = [torch.nn.Parameter(value) for value in parameters]
        optimizer, norms = torch.optim.AdamW(parameters, 0.1, foreach=foreach), []
        for _ in range(2):
            for parameter in parameters:
                (parameter.square() * 3).sum().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=foreach)))
            optimizer.step()
            optimizer.zero_grad()
        return torch.tensor(norms), [parameter.detach() for parameter in parameters]

    meshes = [MESH, other, MESH, other]
    placed = [spmd.distribute(value, P("data"), mesh) for value, mesh in zip(values, meshes, strict=True)]
    assert_same(train(placed), train([value.clone() for value in values]))


def test_copies_and_state() -> None:
    module = placed_module(torch.nn.Linear(4, 6), {"weight": P("model")})
    twin = copy.deepcopy(module)
    twin.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
    assert_same(twin.weight.detach(), module.weight.detach().full_tensor() + 1)
    copied = copy.copy(module.weight)
    assert copied.spec == module.weight.spec == twin.weight.spec and copied.shards == module.weight.shards
    for parameter in (copied, twin.weight):
        assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    buffer = io.BytesIO()
    torch.save((module.state_dict(), module.weight), buffer)
    buffer.seek(0)
    state, weight = torch.load(buffer, weights_only=True)
    assert_same(state["weight"], module.weight.detach().full_tensor())
    assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad and not state["weight"].requires_grad


def test_deep_copies_keep_gradients_and_ties() -> None:
    module = placed_module(torch.nn.Linear(4, 4), {"weight": P("model")})
    module.tied = module.weight
    module(spmd.distribute(torch.rand(3, 4), P("data"), MESH)).sum().backward()
    twin = copy.deepcopy(module)
    assert twin.tied is twin.weight is not module.weight
    assert_same(twin.weight.grad, module.weight.grad.full_tensor())
    with pytest.raises(RuntimeError, match="cannot be copied deeply"):
        copy.deepcopy(module.weight * 2)


def test_a_damaged_pickle_is_refused() -> None:
    function, (where, spec, shards, *rest) = spmd.distribute(torch.rand(4), P("data"), MESH).__reduce_ex__(4)
    for changed in (
        (where, spec, shards[:1], *rest),
        (where, spec, tuple(shard[:1] for shard in shards), *rest),
        (where, ((("model",),), *spec[1:]), shards, *rest),
        (where, ((("none",),), *spec[1:]), shards, *rest),
        ((("data",), (4, 3), *where[2:]), spec, shards, *rest),
    ):
        with pytest.raises((MeshError, ShardingError)):
            function(*changed)


def test_what_is_fixed() -> None:
    x = spmd.distribute(torch.ones(4), P("data"), MESH)
    with pytest.raises(AttributeError, match=r"The spec of a DTensor cannot be set. Use .redistribute\(spec\)"):
        x.spec = None
    with pytest.raises(AttributeError, match=r"The data of a DTensor cannot be set. Write in place"):
        x.data = torch.ones(4)


def test_programs_are_planned_once_and_their_number_is_bounded() -> None:
    x = spmd.distribute(torch.ones(4), P("data"), MESH)
    w = spmd.distribute(torch.ones(4), P("data"), MESH).requires_grad_()
    optimizer = torch.optim.AdamW([w], foreach=True)  # its numbers are others at each step
    rates = itertools.count(1)

    def step() -> None:
        (w * x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            w.sub_(w.grad, alpha=1 / next(rates))
        w.grad = None

    step()
    planned = operator_cache.program_of.cache_info().misses
    gc.collect()
    count = len(gc.get_objects())
    for _ in range(50):
        step()
    gc.collect()
    assert planned == operator_cache.program_of.cache_info().misses
    assert len(gc.get_objects()) < count + 50
    assert operator_cache.program_of.cache_info().maxsize == operator_cache.MAX_PROGRAMS


def test_writes_to_plain_tensors_are_refused() -> None:
    x, plain = spmd.distribute(torch.ones(4), P("data"), MESH), torch.zeros(4)
    with spmd.implicit_replication():
        for write in (lambda: torch.mul(x, 2, out=plain), lambda: plain.copy_(x)):
            with pytest.raises(ShardingError, match=r"at test_eager.py.* writes values of a DTensor to a plain tensor"):
                write()
    assert not plain.any()


def test_autocast_and_inference_mode() -> None:
    def compute(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x.mT
            z = (x * 2).sum(0), torch.nn.functional.softmax(y, -1), y + 1
        with torch.inference_mode():
            w = x * 3
        return y.float(), *(value.float() for value in z), w

    value = torch.rand(4, 4)
    for spec in (P(), P("data"), P(None, "model")):
        for _ in range(2):  # the second call is a known one
            found, expected = compute(spmd.distribute(value, spec, MESH)), compute(value)
            torch.testing.assert_close(whole(found), expected, rtol=2e-2, atol=2e-2)


def test_shapes_change_in_place() -> None:
    def reshape(x: torch.Tensor) -> Any:
        y = x.clone().unsqueeze_(-1)
        z = (x * 2).t_()
        w = x.sum(0, keepdim=True).squeeze_(0)
        return y + 1, z + 1, w, x.clone().transpose_(0, 1).unsqueeze_(0), x.quantile(0.3, dim=1)

    value = torch.rand(5, 7)
    for spec in SPECS:
        assert_same(reshape(spmd.distribute(value, spec, MESH)), reshape(value))
    x = spmd.distribute(value, P(), MESH)
    view = x[1]
    with pytest.raises(ShardingError, match="changes the shape of a DTensor"):
        x.t_()
    with pytest.raises(
        ShardingError, match=r"resize_ .* of a DTensor f32\[5,7\] P\(\) to \[2\] takes elements by thei"
    ):
        (x * 1).resize_(2)
    assert view.shape == (7,)


def test_data_of_another_tensor_is_shared() -> None:
    def change(x: torch.Tensor) -> Any:
        y, z = x + 1, x * 2
        y.data = z.data
        z.add_(1)
        before = y.clone()
        y.mul_(3)
        y.data = x.clone()
        y.zero_()
        return before, z, y

    value = torch.rand(5, 7)
    assert_same(change(spmd.distribute(value, P("data"), MESH)), change(value))


def test_resize_to_the_same_shape_changes_nothing() -> None:
    value = torch.rand(2, 3, 4, 5)
    x = spmd.distribute(value, P("data"), MESH).clone(memory_format=torch.channels_last)
    assert_same(x.resize_(x.shape, memory_format=torch.channels_last), value)
    with pytest.raises(ShardingError, match="takes elements by their place in memory"):
        x.contiguous().resize_(x.shape, memory_format=torch.channels_last)


def test_fills_of_expanded_views_reach_the_base() -> None:
    def fill(x: torch.Tensor) -> Any:
        y, z = x.clone(), x.clone()
        y.expand(2, *y.shape).zero_()
        z[1].expand(3, 7).fill_(2.0)
        return y, z

    value = torch.rand(5, 7)
    assert_same(fill(spmd.distribute(value, P("data"), MESH)), fill(value))


def test_printing() -> None:
    x = spmd.distribute(torch.arange(6.0).view(2, 3), P("data"), MESH)
    assert (
        str(x)
        == f"{x}"
        == ("DTensor([[0., 1., 2.],\n         [3., 4., 5.]], f32[2,3] P('data') on Mesh(data=2, model=3))")
    )
    assert repr(x) == "DTensor(f32[2,3] P('data') on Mesh(data=2, model=3), shards 6x[1,3])"
    assert str(spmd.distribute(torch.ones(2), P(partial={"data": "sum"}), MESH)).startswith("DTensor([1., 1.], f32[2]")


def test_an_empty_plain_tensor_may_be_an_operand() -> None:
    """As transformers starts a cache: torch.cat passes over such a tensor."""
    x = torch.randn(5, 4)
    placed = spmd.distribute(x, P("data"), MESH).requires_grad_()
    found = torch.cat([torch.tensor([]), placed.sin()])
    torch.testing.assert_close(found.detach().full_tensor(), x.sin())
    found.sum().backward()
    torch.testing.assert_close(placed.grad.full_tensor(), x.cos())  # type: ignore[union-attr]
