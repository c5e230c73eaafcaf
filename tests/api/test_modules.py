"""Modules as arguments of jitted functions and as such functions, against one device."""

import copy
import dataclasses
import functools

import pytest
import torch
from stock_models import MODELS, STRATEGIES, place
from torch import nn
from torch.nn.utils import parametrizations

import spmd
from spmd import P
from spmd.errors import ShardingError, TraceError

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")


class Tied(nn.Module):
    """Two layers with one weight, batch norm between them, and a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.scale = 1.0

    def forward(self, x):
        self.calls = self.calls + 1
        return self.scale * self.last(self.norm(self.first(x)).relu())


def tied():
    torch.manual_seed(0)
    return Tied()


def values(seed=0, *shape):
    return torch.randn(shape or (6, 4), generator=torch.Generator().manual_seed(seed))


def whole(x):
    return x.full_tensor() if isinstance(x, spmd.DTensor) else x


def equal(found, expected, **tolerances):
    torch.testing.assert_close(whole(found), expected, **tolerances)


def equal_state(found, expected):
    for (name, one), (other_name, other) in zip(found.state_dict().items(), expected.state_dict().items(), strict=True):
        assert name == other_name
        equal(one, other)


def sharded(model, specs):
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    specs = {name: specs if tensor.ndim else P() for name, tensor in state.items()}
    model.load_state_dict(spmd.distribute(state, specs, MESH), assign=True, strict=False)
    model.last.weight = model.first.weight
    return model


FORMS = {
    "argument": lambda model, **options: functools.partial(spmd.jit(lambda m, x: m(x), **options), model),
    "function": lambda model, **options: spmd.jit(model, **options),
    "method": lambda model, **options: spmd.jit(model.forward, **options),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("no_grad", [True, False])
def test_values_and_buffers_are_those_of_one_device(form, no_grad):
    model, alone, x = tied(), tied(), values()
    f = FORMS[form](model, mesh=MESH)
    with torch.set_grad_enabled(not no_grad):
        for seed in range(3):
            equal(f(values(seed)), alone(values(seed)))
            equal_state(model, alone)
        model.eval(), alone.eval()
        equal(f(x), alone(x))
        equal_state(model, alone)
        model.train(), alone.train()
        equal(f(x), alone(x))
        equal_state(model, alone)
    assert model.norm.running_mean.requires_grad is False
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


@pytest.mark.parametrize("form", ["argument", "function"])
def test_modules_under_torch_compile_are_inlined_and_this_is_said(form, caplog):
    model, alone, x = tied(), tied(), values()
    f = FORMS[form](torch.compile(model, backend="eager"), mesh=MESH)
    for _ in range(2):
        found, expected = f(x), alone(x)
        equal(found.detach(), expected.detach())
        equal_state(model, alone)
    found.square().sum().backward(), expected.square().sum().backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        equal(one.grad, other.grad)
    assert any("torch.compile was called in one under spmd.jit at" in record.message for record in caplog.records)


def test_a_closed_over_module_under_torch_compile_is_inlined():
    model, x = nn.Linear(4, 3), values()
    compiled = torch.compile(model, backend="eager")
    f = spmd.jit(lambda x: compiled(x), mesh=MESH)
    with torch.no_grad():
        equal(f(x), model(x))
        model.weight.mul_(2)
        equal(f(x), model(x))
    expected = torch.func.grad(lambda x: model(x).sin().sum())(x)
    equal(torch.func.grad(lambda x: f(x).sin().sum())(x), expected)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stock_models_train_with_dtensors_as_parameters(model, strategy):
    make, shape = MODELS[model]
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module, alone = place(make(), STRATEGIES[strategy], MESH), make()
    specs = {name: value.spec for name, value in module.state_dict().items()}
    loss = spmd.jit(lambda m, x: m(x).sin().sum(), {"x": P("data")}, mesh=MESH)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (module, alone)]
    for _ in range(2):
        found, expected = loss(module, x), alone(x).sin().sum()
        equal(found, expected, rtol=1e-7, atol=1e-9)
        found.backward(), expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(module.state_dict().items(), alone.state_dict().values(), strict=True):
        equal(one, other, rtol=1e-7, atol=1e-9)
        assert specs[name] == one.spec
    assert 1 == loss.cache_info().currsize


def specs_for(kind, model):
    return {
        "prefix": lambda: P(("data", "model")),
        "names": lambda: spmd.specs(model, {"*.weight": P("data"), "*running*": P("model")}),
        "fully sharded": lambda: spmd.fsdp_specs(model, "data"),
        "none": lambda: None,
        "some": lambda: {**spmd.specs(model, {"first.weight": P("data")}), "last.bias": None},
    }[kind]()


@pytest.mark.parametrize("kind", ["names", "fully sharded", "none", "some"])
def test_specs_of_an_argument(kind):
    model, alone, x = tied(), tied(), values()
    specs = specs_for(kind, model)
    f = spmd.jit(lambda m, x: m(x), (specs, P("data")), mesh=MESH)
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    found = dict(zip(names, f.compile(model, x).in_specs, strict=False))
    for name in names:
        assert found[name].pspec == ((specs or {}).get(name) or P())
    with torch.no_grad():
        equal(f(model, x), alone(x))
        equal(f(model, x), alone(x))
    equal_state(model, alone)


def test_a_dtensor_keeps_its_spec_and_a_wrong_one_is_refused():
    model, x = sharded(tied(), P(("data", "model"))), values()
    with pytest.raises(ShardingError, match=r"argument self.first.weight f32\[4,4\] has spec"):
        spmd.jit(model, {"self": P()}, mesh=MESH)(x)


def test_specs_that_do_not_fit_name_the_tensors():
    with pytest.raises(ShardingError, match="a dict by the names of the tensors of Linear: weight, bias"):
        spmd.jit(lambda m, x: m(x), ({"weight": P()}, P()), mesh=MESH)(nn.Linear(4, 4), values())
    with pytest.raises(ShardingError, match=r"argument 0\.weight"):
        spmd.jit(lambda m, x: m(x), (P(None, None, "data"), P()), mesh=MESH)(nn.Linear(4, 4), values())


@dataclasses.dataclass
class Holder:
    model: nn.Module
    step: int = 0


CONTAINERS = {
    "dict": (lambda m: {"m": m, "b": values(2)}, lambda c: c["m"]),
    "tuple": (lambda m: (values(2), [m]), lambda c: c[1][0]),
    "dataclass": (Holder, lambda c: c.model),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_in_containers(kind):
    make, take = CONTAINERS[kind]
    model, alone = tied(), tied()
    f = spmd.jit(lambda c, x: take(c)(x), (None, P("data")), mesh=MESH)
    container = make(model)
    with torch.no_grad():
        for seed in range(2):
            equal(f(container, values(seed)), alone(values(seed)))
    equal_state(model, alone)
    assert take(container) is model


@pytest.mark.parametrize("form", FORMS)
def test_gradients_from_outside(form):
    model, alone, x = tied(), tied(), values()
    f = FORMS[form](sharded(model, P("data")) if form != "method" else model, mesh=MESH)
    f(x).square().sum().backward()
    alone(x).square().sum().backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        equal(one.grad, other.grad)
    equal_state(model, alone)


def test_gradients_of_a_closed_over_module_are_missed():
    model, x = nn.Linear(4, 4), spmd.distribute(values(), P("data"), MESH).requires_grad_()
    f = spmd.jit(lambda x: model(x).sum(), mesh=MESH)
    with pytest.raises(ShardingError, match=r"does not require grad.*spmd\.jit\(lambda model, x: model\(x\)\)"):
        f(values()).backward()
    message = r"closes over 2 tensors that require grad, such as one f32\[4,4\].*Pass what has them as an argument"
    with pytest.warns(UserWarning, match=message) as caught:
        f(x).backward()
    x.grad = None
    f(x).backward()  # it is said once
    assert [__file__] == [found.filename for found in caught]
    equal(x.grad, model.weight.sum(0).expand(6, 4))
    assert model.weight.grad is None


def test_a_frozen_parameter_gets_no_gradient():
    model, alone, x = tied(), tied(), values()
    for m in (model, alone):
        m.first.requires_grad_(False)
    f = spmd.jit(model, mesh=MESH)
    f(x).sum().backward()
    alone(x).sum().backward()
    assert model.first.weight.grad is None and alone.first.weight.grad is None
    equal(model.last.bias.grad, alone.last.bias.grad)


def inside_by_function(model, x):
    def loss(params):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return torch.func.functional_call(model, (params, buffers), (x,)).square().sum()

    return tuple(torch.func.grad(loss)(dict(model.named_parameters())).values())


def inside_by_autograd(model, x):
    return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))


@pytest.mark.parametrize("function", [inside_by_function, inside_by_autograd])
def test_gradients_inside(function):
    model, alone, x = sharded(tied(), P("data")), tied(), values()
    for one, other in zip(spmd.jit(function, (None, P("data")), mesh=MESH)(model, x), function(alone, x), strict=True):
        equal(one, other)
    equal_state(model, alone)


def test_a_gradient_by_torch_func_from_outside():
    model, alone, x = tied(), tied(), values()
    f = spmd.jit(lambda m, x: m(x).square().sum(), mesh=MESH)
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(alone(leaf).square().sum(), leaf)[0]  # torch.func.grad refuses batch norm there
    equal(torch.func.grad(f, argnums=1)(model, x), expected)
    equal_state(model, alone)


def test_a_buffer_has_no_values_of_a_batch():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = x.mean()
            return x

    model = Remembers()
    f = spmd.jit(model, mesh=MESH)
    f(values())
    equal(model.seen, values().mean())
    with pytest.raises(TraceError, match=r"The buffer seen is updated in a function under torch\.func\.vmap"):
        torch.func.vmap(f)(values(0, 3, 6, 4))
    equal(model.seen, values().mean())


def test_reassigned_and_updated_tensors_are_seen_without_a_new_program():
    model, x = nn.Linear(4, 4), values()
    f = spmd.jit(model, mesh=MESH)
    with torch.no_grad():
        equal(f(x), model(x))
        model.weight.mul_(2)
        equal(f(x), model(x))
        model.weight = nn.Parameter(values(1, 4, 4))
        equal(f(x), model(x))
        model.load_state_dict({"weight": values(2, 4, 4), "bias": values(3, 4)})
        equal(f(x), model(x))
        model.weight.data = values(4, 4, 4)
        equal(f(x), model(x))
    assert 1 == f.cache_info().currsize


class Config:
    def __init__(self):
        self.scale, self.shifts = 2.0, [1.0]


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.config, self.mode, self.table = nn.Linear(4, 4), Config(), "plus", torch.ones(4)
        self.factors, self.sizes = {"x": 1.0, "more": {"y": 1.0}}, [4]
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        x = self.drop(self.inner(x)) * self.config.scale + self.table
        x = x * self.factors["x"] * self.factors["more"].get("y", 3.0) * self.sizes[0]
        return x + sum(self.config.shifts) if self.mode == "plus" else x


def set_scale(m):
    m.config.scale = 3.0


def set_shifts(m):
    m.config.shifts = [1.0, 2.0]


def append_to_a_list_of_the_config(m):
    m.config.shifts.append(2.0)


def set_an_item(m):
    m.factors["x"] = 2.0


def set_an_item_of_a_list(m):
    m.sizes[0] = 5


def rename_an_inner_item(m):
    m.factors["more"]["z"] = m.factors["more"].pop("y")


def set_mode(m):
    m.mode = "other"


def set_table(m):
    m.table = torch.full((4,), 5.0)


def write_table(m):
    m.table.add_(1)


def replace_submodule(m):
    m.inner = nn.Sequential(nn.Linear(4, 4, bias=False))
    m.inner[0].weight = nn.Parameter(values(5, 4, 4))


def add_hook(m):
    m.inner.register_forward_hook(lambda module, args, result: 7 * result)


def drop_bias(m):
    m.inner.bias = None


def tie(m):
    m.inner.weight = m.inner.bias = nn.Parameter(torch.ones(4))


def set_dropout(m):
    m.drop.p = 1.0


def parametrize(m):
    nn.utils.parametrize.register_parametrization(m.inner, "weight", Doubled())


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


CHANGES = [
    set_scale,
    set_shifts,
    append_to_a_list_of_the_config,
    set_an_item,
    set_an_item_of_a_list,
    rename_an_inner_item,
    set_mode,
    set_table,
    write_table,
    replace_submodule,
    add_hook,
    drop_bias,
    set_dropout,
    parametrize,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_module_are_other_programs(change):
    model, x = Configured(), values()
    f = spmd.jit(model, mesh=MESH)
    with torch.no_grad():
        equal(f(x), model(x))
        equal(f(x), model(x))
        assert 1 == f.cache_info().currsize
        change(model)
        equal(f(x), model(x))
        equal(f(x), model(x))
        assert 2 == f.cache_info().misses


def test_equal_modules_share_a_program():
    models, x = [nn.Linear(4, 4) for _ in range(3)], values()
    f = spmd.jit(lambda m, x: m(x), mesh=MESH)
    with torch.no_grad():
        for model in models * 2:
            equal(f(model, x), model(x))
    assert 1 == f.cache_info().currsize


def test_buffers_of_the_module_of_the_call_are_assigned():
    models, alone, x = [nn.BatchNorm1d(4) for _ in range(2)], [nn.BatchNorm1d(4) for _ in range(2)], values()
    f = spmd.jit(lambda m, x: m(x), mesh=MESH)
    with torch.no_grad():
        for number in (0, 1, 1, 0, 1):
            equal(f(models[number], values(number)), alone[number](values(number)))
    for one, other in zip(models, alone, strict=True):
        equal_state(one, other)
    assert x.shape and 1 == f.cache_info().currsize


def test_donated_modules_get_their_buffers():
    model, alone, x = sharded(tied(), P("data")), tied(), values()
    weight = model.first.weight
    f = spmd.jit(lambda m, x: (m(x), dict(m.named_parameters())), mesh=MESH, donate_argnums=0)
    with torch.no_grad():
        result, params = f(model, x)
        equal(result, alone(x))
    for name, buffer in model.named_buffers():
        equal(buffer, dict(alone.named_buffers())[name])
        assert buffer.spec.pspec == P("data") if buffer.ndim else True
    with pytest.raises(ShardingError, match="donated"):
        weight.full_tensor()
    model.load_state_dict(params, assign=True, strict=False)
    model.last.weight = model.first.weight
    with torch.no_grad():
        equal(f(model, x)[0], alone(x))
    for name, buffer in model.named_buffers():
        equal(buffer, dict(alone.named_buffers())[name])


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(4, 5, 2, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


WRAPPED = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_modules_that_compute_or_list_their_parameters(kind):
    torch.manual_seed(0)
    model = WRAPPED[kind]()
    torch.manual_seed(0)
    alone = WRAPPED[kind]()
    f = spmd.jit(model, P("data"), mesh=MESH)
    x = values(0, 4, 3, 4) if isinstance(model, Recurrent) else values()
    for _ in range(2):
        equal(f(x), alone(x))
        f(x).square().sum().backward()
        alone(x).square().sum().backward()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            equal(one.grad, other.grad)
        with torch.no_grad():
            for m in (model, alone):
                next(iter(m.parameters())).mul_(1.5)
    assert 1 == f.cache_info().currsize


class Listed(nn.Module):
    """A module that has its parameters in a list, and a bound method as attribute, too."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(values(1, 4, 4))
        self.all, self.run = [self.w], self.product

    def product(self, x):
        return x @ self.all[0] + x @ self.w

    def forward(self, x):
        return self.run(x)


def test_a_list_of_parameters_holds_those_of_the_call():
    model, x = Listed(), values()
    f = spmd.jit(model, mesh=MESH)
    with torch.no_grad():
        equal(f(x), 2 * x @ model.w)
        model.w.mul_(3)
        equal(f(x), 2 * x @ model.w)
    assert 1 == f.cache_info().currsize and model.all[0] is model.w


class Stepped(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(values(1, 4, 4))

    @spmd.jit({"x": P("data")}, mesh=MESH)
    def step(self, x, *, power=1):
        return (x @ self.w) ** power


def test_jitted_methods_of_modules_see_their_parameters():
    model, x = Stepped(), values()
    with torch.no_grad():
        equal(model.step(x), x @ model.w)
        model.w.mul_(2)
        equal(model.step(x), x @ model.w)
        other = copy.deepcopy(model)
        other.w.mul_(2)
        equal(other.step(x), x @ other.w)
    model.step(x).sum().backward()
    equal(model.w.grad, x.sum(0)[:, None].expand(4, 4))


def test_calls_of_a_module_are_those_of_its_forward():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(values(1, 4, 4))

        def forward(self, x, mask=None, **rest):
            y = x @ self.w
            return {"y": y if mask is None else y * mask, **rest}

    model, x = Masked(), values()
    f = spmd.jit(model, {"x": P("data")}, mesh=MESH)
    with torch.no_grad():
        equal(f(x, x)["y"], x @ model.w * x)
        equal(f(x)["y"], x @ model.w)
        equal(f(x, extra=x)["extra"], x)
        compiled = f.compile(x)
        equal(compiled(x)["y"], x @ model.w)
    assert f.trace(x).input_paths == ("0", "self.w")
    assert [spec.pspec for spec in f.compile(x).in_specs] == [P("data"), P()]
    assert f.lower(x).as_text() and f.plan(x).mesh == MESH and f.__wrapped__ is model
    with pytest.raises(TraceError, match="missing a required argument: 'x'"):
        f()


def test_inside_of_another_function_and_uncompiled():
    model, alone, x = tied(), tied(), values()
    inner = spmd.jit(lambda m, x: m(x), {"x": P("data")}, mesh=MESH)
    outer = spmd.jit(lambda m, x: inner(m, x) + inner(m, x), mesh=MESH)
    with torch.no_grad():
        equal(outer(model, x), alone(x) + alone(x))
        equal_state(model, alone)
        with spmd.disable_jit():
            equal(inner(model, x), alone(x))
            equal_state(model, alone)
            equal(outer(model, x), alone(x) + alone(x))
            equal_state(model, alone)


@pytest.mark.parametrize("named", [False, True])
def test_a_module_as_result_is_refused(named):
    f = spmd.jit(lambda m: {"m": m} if named else m, mesh=MESH)
    with pytest.raises(TraceError, match=r"returns a module \(Linear\)"):
        f(nn.Linear(4, 4))
    model = nn.Linear(4, 4)
    with pytest.raises(TraceError, match=r"must be a tensor or a number \(got Linear"):
        spmd.jit(lambda x: [model, x], mesh=MESH)(values())


def test_writes_to_parameters_are_refused():
    def write(m):
        with torch.no_grad():
            m.weight.mul_(2)
        return m.weight

    def assign(m):
        m.weight = nn.Parameter(m.weight * 2)
        return m.weight

    def forget(m):
        m.running_mean = None
        return m.weight

    model = nn.BatchNorm1d(4)
    before = dict(model.named_parameters()), dict(model.named_buffers())
    for function, message in (
        (write, "In-place write to argument 0.weight"),
        (assign, "assigns to the parameter BatchNorm1d.weight"),
        (forget, "assigns NoneType to the buffer BatchNorm1d.running_mean"),
    ):
        with pytest.raises(TraceError, match=message):
            spmd.jit(function, mesh=MESH)(model)
        assert all(x is y for x, y in zip(before[0].values(), model.parameters(), strict=True))
        assert all(x is y for x, y in zip(before[1].values(), model.buffers(), strict=True))


def test_other_functions_refuse_modules():
    model = nn.Linear(4, 4)
    spmd.jit(model, mesh=MESH)(values())
    with pytest.raises(ShardingError, match=r"Pass its state, dict\(module.named_parameters\(\)\)"):
        spmd.distribute(model, P(), MESH)


def test_a_number_before_and_after_a_module():
    def f(scale, model, flag, x, shift):
        return {"y": model(x) * scale + shift, "scale": scale * 2, "flag": flag}

    model, whole = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    step = spmd.jit(f, in_specs={"x": P("data")}, mesh=MESH)
    for scale, shift in ((2.0, 1.0), (3.0, -1.0)):
        x = torch.randn(6, 8)
        found, expected = step(scale, model, True, x, shift), f(scale, whole, True, x, shift)
        torch.testing.assert_close(found["y"].full_tensor(), expected["y"])
        assert (found["scale"], found["flag"]) == (scale * 2, True)
        torch.testing.assert_close(model.running_mean, whole.running_mean)
        assert model.num_batches_tracked == whole.num_batches_tracked
    assert step.cache_info().misses == 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_gradient_of_weight_norm_runs_sharded(dim: int, size: int) -> None:
    layer = parametrizations.weight_norm(nn.Conv1d(6, 4, 3, dtype=torch.float64), dim=dim)
    weights, x = dict(layer.named_parameters()), torch.randn(5, 6, 9, dtype=torch.float64)

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, weights, (x,)).square().mean()  # type: ignore[no-any-return]

    specs = {name: P("x") if value.shape[0] > 1 else P() for name, value in weights.items()}
    mesh = spmd.make_mesh({"x": size}, runtime="virtual")
    found = spmd.jit(torch.func.grad(loss), (specs, P("x")), specs, mesh=mesh)(weights, x)
    for name, expected in torch.func.grad(loss)(weights, x).items():
        torch.testing.assert_close(found[name].full_tensor(), expected)
