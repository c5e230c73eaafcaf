"""Equal layers are traced once: the program is the same, and unequal layers are never taken for equal ones."""

import contextvars
import functools
import random
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import P
from spmd.collectives import psum


@pytest.fixture(autouse=True)
def _few_layers(monkeypatch):
    monkeypatch.setattr("spmd.api.reuse.FEWEST", 3)


MESH = spmd.make_mesh({"data": 2}, runtime="virtual")
LAYERS, WIDTH = 4, 8


class Scaled(nn.Module):
    """A layer of more operators than are traced again, with attributes of which it reads some."""

    def __init__(self, number: int = 0, **attributes):
        super().__init__()
        self.number = number
        self.scale, self.probability, self.shared = 1.0, 0.0, None
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        vars(self).update(attributes)

    def forward(self, x, mask=None, times=1.0):
        y = F.softmax(self.down(F.gelu(self.up(self.norm(x)))), -1) * self.scale * times
        y = y.reshape(-1, 2, WIDTH // 2).transpose(1, 2).reshape(x.shape) + y.sin().cos()
        return x + F.dropout(y if mask is None else y * mask, self.probability, self.training)


class Stack(nn.Module):
    """Layers, one after the other, as a function calls them."""

    def __init__(self, layers, call=lambda layer, x, number: layer(x)):
        super().__init__()
        self.layers, self.call = nn.ModuleList(layers), call

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = self.call(layer, x, number)
        return x


def layers(count=LAYERS, cls=Scaled, **attributes):
    torch.manual_seed(0)
    return [cls(number, **attributes) for number in range(count)]


def counts(caplog):
    """How often layers were not traced again, as the log says."""
    texts = [record.getMessage() for record in caplog.records if "equal layers" in record.getMessage()]
    found = Counter()
    for text in texts:
        for part in text.rpartition(": ")[2].rstrip(".").split(", "):
            count, _, name = part.split(" ")
            found[name] += int(count)
    return dict(found)


def state(model):
    return {name: x.detach() for name, x in model.named_parameters()}


def loss(model):
    return lambda params, x: (torch.func.functional_call(model, params, (x,)) ** 2).mean()


def compare(function, *args, specs=None, rng="torch", log=None, truth=None):
    """The values of both programs, equal bit by bit, of the same operators, and those of one device, of `truth`."""
    operators, values = [], []
    for reuse in (False, True):
        jitted = spmd.jit(function, specs or (P(), P("data")), P(), mesh=MESH, reuse_layers=reuse, rng=rng)
        torch.manual_seed(1)
        with spmd.log_compiles():
            values.append(spmd.full_tree(jitted(*args)))
        plan = jitted.plan(*args)
        collectives = [str(collective) for collective in jitted.lower(*args).collectives]
        operators.append((Counter(str(operation.op) for operation in plan.request.graph.operations), collectives))
    assert operators[0] == operators[1]
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=0)
    if rng == "torch":
        torch.manual_seed(1)
        torch.testing.assert_close(values[1], (truth or function)(*args))
    return counts(log) if log is not None else None


FACTOR = torch.tensor([2.0])
X = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(0))
FUNCTIONS = {
    "values": lambda f: f,
    "gradient": lambda f: torch.func.grad(f),
    "gradient of both": lambda f: torch.func.grad(f, argnums=(0, 1)),
    "vmap": lambda f: lambda p, x: torch.vmap(f, (None, 0))(p, x),
    "vmap of gradient": lambda f: lambda p, x: torch.vmap(torch.func.grad(f), (None, 0))(p, x),
    "gradient of vmap": lambda f: torch.func.grad(lambda p, x: torch.vmap(f, (None, 0))(p, x).sum()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_programs_are_equal(name, caplog):
    found = compare(FUNCTIONS[name](loss(model := Stack(layers()))), state(model), X, log=caplog)
    alone = "gradient" in name and name != "gradient of both"  # the first layer, whose argument has no gradient
    assert found == {"Scaled": LAYERS - 1 - alone}


TWICE = {
    "second derivative": lambda f: torch.func.grad(lambda p, x: torch.func.grad(f, 1)(p, x).square().sum()),
    "jvp": lambda f: lambda p, x: torch.func.jvp(lambda x: f(p, x), (x,), (x.cos(),))[1],
    "jvp of gradient": lambda f: lambda p, x: torch.func.jvp(torch.func.grad(lambda x: f(p, x)), (x,), (x.cos(),))[1],
    "gradient of jvp": lambda f: torch.func.grad(lambda p, x: torch.func.jvp(lambda x: f(p, x), (x,), (x,))[1]),
}


@pytest.mark.parametrize("name", TWICE)
def test_forward_mode_and_second_derivatives_trace_each_layer(name, caplog):
    assert compare(TWICE[name](loss(model := Stack(layers()))), state(model), X, log=caplog) == {}


def torch_grad(model, x):
    return torch.autograd.grad(model(x).square().mean(), list(model.parameters()))


@pytest.mark.parametrize("call", [torch_grad, lambda model, x: model(x)])
def test_modules_as_arguments(call, caplog):
    assert compare(call, Stack(layers()), X, log=caplog) == {"Scaled": LAYERS - 2}


def test_gradients_of_gradients_of_autograd(caplog):
    def function(model, x):
        params = list(model.parameters())
        grads = torch.autograd.grad(model(x).square().mean(), params, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), params, materialize_grads=True)

    model = Stack(layers())
    found = spmd.jit(function, (P(), P("data")), P(), mesh=MESH)(model, X)
    torch.testing.assert_close(spmd.full_tree(found), function(model, X))


def test_parameters_that_are_frozen_have_no_gradient(caplog):
    model = Stack(layers())
    for layer in model.layers[1:]:
        layer.up.requires_grad_(False)

    def function(model, x):
        params = [p for p in model.parameters() if p.requires_grad]
        return torch.autograd.grad(model(x).square().mean(), params)

    assert compare(function, model, X, log=caplog) == {"Scaled": LAYERS - 2}


def test_checkpointed_layers(caplog):
    call = lambda layer, x, number: checkpoint(layer, x, use_reentrant=False)  # noqa: E731
    assert compare(torch_grad, Stack(layers(), call), X, log=caplog) == {"Scaled": LAYERS - 2}


def test_draws_are_those_of_one_device(caplog):
    model = Stack(layers(probability=0.25)).train()
    assert compare(torch.func.grad(loss(model)), state(model), X, log=caplog) == {"Scaled": LAYERS - 2}


def test_keyed_draws_differ_between_layers(caplog):
    model = Stack(layers(probability=0.5)).train()
    assert compare(loss(model), state(model), X, rng="counter", log=caplog) == {}


def test_autocast(caplog):
    def function(params, x):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model)(params, x)

    model = Stack(layers())
    assert compare(torch.func.grad(function), state(model), X, log=caplog) == {"Scaled": LAYERS - 2}


def test_numbers_that_layers_do_not_read_may_differ(caplog):
    model = Stack(layers())
    for number, layer in enumerate(model.layers):
        layer.up.number = layer.number = number
    assert compare(loss(model), state(model), X, log=caplog) == {"Scaled": LAYERS - 1}


def test_few_layers_are_traced_each_time(caplog, monkeypatch):
    monkeypatch.setattr("spmd.api.reuse.FEWEST", LAYERS + 1)
    assert compare(loss(model := Stack(layers())), state(model), X, log=caplog) == {}


def test_groups_of_any_pattern(caplog):
    made = layers(6)
    for layer in made[1::2]:
        layer.scale = 0.5
    assert compare(torch.func.grad(loss(model := Stack(made))), state(model), X, log=caplog) == {"Scaled": 3}


def test_a_layer_in_a_layer(caplog):
    class Twice(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.first, self.second = Scaled(), Scaled()
            self.second.scale = 0.5 if number == 1 else 1.0

        def forward(self, x):
            return self.second(self.first(x))

    model = Stack(layers(4, Twice))
    found = compare(torch.func.grad(loss(model)), state(model), X, log=caplog)
    assert found["Twice"] == 1


class Counting(Scaled):
    def forward(self, x, mask=None, times=1.0):
        self.number += 1
        return super().forward(x, mask, times)


class Buffered(Scaled):
    def __init__(self, number):
        super().__init__(number)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, mask=None, times=1.0):
        self.seen += x.detach().mean()
        return super().forward(x, mask, times)


class ByNumber(Scaled):
    def forward(self, x, mask=None, times=1.0):
        return super().forward(x, mask, times * (1 + self.number))


class ByDict(Scaled):
    def forward(self, x, mask=None, times=1.0):
        return super().forward(x, mask, times * (1 + vars(self)["number"]))


class InPlace(Scaled):
    def forward(self, x, mask=None, times=1.0):
        x += super().forward(x, mask, times)
        return x


class Viewing(Scaled):
    def forward(self, x, mask=None, times=1.0):
        super().forward(x, mask, times).sum()
        return x[:, :]


SCALES = [1.0, 2.0, 3.0, 4.0]


class ByGlobal(Scaled):
    def forward(self, x, mask=None, times=1.0):
        SCALES.append(SCALES.pop(0))
        return super().forward(x, mask, times * SCALES[0])


class ByRandom(Scaled):
    def forward(self, x, mask=None, times=1.0):
        return super().forward(x, mask, times * random.Random(0).random() * (1 + 0 * random.random()))


VARIABLE = contextvars.ContextVar("scale", default=1.0)


class ByContext(Scaled):
    def forward(self, x, mask=None, times=1.0):
        VARIABLE.set(VARIABLE.get() + 0.5)
        return super().forward(x, mask, times * VARIABLE.get())


class ByCachedMethod(Scaled):
    @functools.lru_cache(maxsize=64)  # noqa: B019
    def scale_of(self):
        SCALES.append(SCALES.pop(0))
        return SCALES[0]

    def forward(self, x, mask=None, times=1.0):
        return super().forward(x, mask, times * self.scale_of())


class ByOwner(Scaled):
    """What it reads is an object that its owner changes between the calls."""

    def forward(self, x, mask=None, times=1.0):
        return super().forward(x, mask, times * self.shared["scale"])


SHARED = {"scale": 1.0}


def sharing(layer, x, number):
    SHARED["scale"] = 1.0 + number
    return layer(x)


def patched(number, **attributes):
    layer = Scaled(number)
    forward = layer.forward
    layer.forward = lambda x: forward(x, times=1.0 + number)
    return layer


def hooked(number, **attributes):
    layer = Scaled(number)
    layer.up.register_forward_hook(lambda module, args, output: output * (1 + number))
    return layer


def in_training(number, **attributes):
    return Scaled(number, probability=0.5).train(number % 2 == 0)


def tied(number, **attributes):
    layer = Scaled(number)
    if number % 2:
        layer.down.bias = layer.norm.bias
    return layer


def wide(number, **attributes):
    layer = Scaled(number)
    layer.up, layer.down = nn.Linear(WIDTH, 8 + number), nn.Linear(8 + number, WIDTH)
    return layer


def in_float64(number, **attributes):
    layer = Scaled(number)
    return layer.double() if number % 2 else layer


def of_other_parts(number, **attributes):
    layer = Scaled(number)
    layer.norm = nn.LayerNorm(WIDTH, eps=10.0**-number)
    return layer


UNEQUAL = {
    "a counter": (Counting, None, {}),
    "a number that is read": (ByNumber, None, {}),
    "a number that is read of all attributes": (ByDict, None, {}),
    "an argument that is written": (InPlace, lambda layer, x, number: layer(x.clone()), {}),
    "a view": (Viewing, None, {}),
    "a global that changes": (ByGlobal, None, {}),
    "random numbers of Python": (ByRandom, None, {}),
    "a variable of the context": (ByContext, None, {}),
    "a cached method": (ByCachedMethod, None, {}),
    "an object that changes": (lambda number: ByOwner(number, shared=SHARED), sharing, {}),
    "a method of the object": (patched, None, {}),
    "hooks": (hooked, None, {}),
    "ties": (tied, None, {"Scaled": 2}),
    "widths": (wide, None, {}),
    "numbers of submodules": (of_other_parts, None, {}),
    "another argument": (Scaled, lambda layer, x, number: layer(x, None, 1.0 + number), {}),
    "a missing argument": (Scaled, lambda layer, x, number: layer(x, x if number % 2 else None), {"Scaled": 2}),
    "another dtype": (
        Scaled,
        lambda layer, x, number: layer(x, x.double() if number % 2 else x).float(),
        {"Scaled": 2},
    ),
    "no gradients": (
        Scaled,
        lambda layer, x, number: without_grad(layer, x) if number % 2 else layer(x),
        {"Scaled": 2},
    ),
    "one tensor twice": (Scaled, lambda layer, x, number: layer(x, x if number % 2 else x.sin()), {"Scaled": 2}),
    "strides": (Scaled, lambda layer, x, number: layer(x, x.mT.contiguous().mT if number else x), {"Scaled": 2}),
}


def without_grad(layer, x):
    with torch.no_grad():
        return x + layer(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_layers(name, caplog):
    cls, call, expected = UNEQUAL[name]
    torch.manual_seed(0)
    model = Stack([cls(number) for number in range(LAYERS)], call or (lambda layer, x, number: layer(x)))
    jitted = {}
    random.seed(0)
    VARIABLE.set(1.0)
    expected_value = loss(model)(state(model), X)
    for reuse in (False, True):
        SCALES[:] = [1.0, 2.0, 3.0, 4.0]
        for number, layer in enumerate(model.layers):
            layer.number = number
        random.seed(0)
        VARIABLE.set(1.0)
        ByCachedMethod.scale_of.cache_clear()
        with spmd.log_compiles():
            jitted[reuse] = spmd.jit(loss(model), (P(), P("data")), P(), mesh=MESH, reuse_layers=reuse)(state(model), X)
    assert counts(caplog) == expected
    torch.testing.assert_close(jitted[True].full_tensor(), jitted[False].full_tensor(), rtol=0, atol=0)
    if name not in ("a counter", "a global that changes", "a cached method", "a variable of the context"):
        torch.testing.assert_close(jitted[True].full_tensor(), expected_value)


def returning(results):
    """A class of layers that return what `results` makes of the argument and of what a layer computes of it."""

    class Returning(Scaled):
        def forward(self, x):
            return results(x, super().forward(x))

    return Returning


def transposed(x, y):
    turned = y.mT
    return turned, turned[:, 0], x[:, 1:]


def written_first(x, y):
    part = y[:, 0]
    part *= 2
    return y, part


def without_gradient(x, y):
    with torch.no_grad():
        return y, x.mT, y[0] * 2


def with_gradient(x, y):
    with torch.enable_grad():
        return (y * x.sin(),)


def with_argument(x, y):
    return y, x, y


def with_outside(x, y):
    return y, FACTOR


VIEWS = {  # the layers, how often their program is called, what the caller writes to, and whether it may be an argument
    "strides": (lambda x, y: (y.mT.contiguous().mT,), True, 0),
    "views of arguments and results": (transposed, True, 0),
    "a result of which another is a view": (transposed, True, 1),
    "a view of a result": (lambda x, y: (y, y.mT[1]), True, 1),
    "a view of a view": (lambda x, y: ((z := y.mT), z[0, 1:]), True, 1),
    "a view that was written to": (written_first, True, 1),
    "parts of one tensor": (lambda x, y: (y, *torch.cat([y, y], -1).chunk(2, -1)), False, 0),
    "an argument": (with_argument, True, 2),
    "a tensor from outside": (with_outside, True, 0),
    "no gradient": (without_gradient, False, 0),
    "data": (lambda x, y: (y, y.data.sin()), False, 0),
    "a detached result": (lambda x, y: (y, y.detach()), False, 0),
    "a detached view": (lambda x, y: (y, (y * 2).detach().mT), True, 1),
    "a slice": (lambda x, y: (torch.cat([y, y], -1)[..., :WIDTH],), False, 0),
    "views of a tensor that is no result": (lambda x, y: (y.mT, y[0]), False, 1),
    "a view alone": (lambda x, y: (x.mT.mT,), False, None),
}


@pytest.mark.parametrize("function", ["values", "gradient of both", "vmap of gradient"])
@pytest.mark.parametrize("name", VIEWS)
def test_results_that_are_views(name, function, caplog):
    results, is_reused, written = VIEWS[name]

    def call(layer, x, number):
        found = layer(x.clone(memory_format=torch.contiguous_format))
        if written is not None:
            found[written].mul_(1 + number)
        first, *others = found
        assert name != "an argument" or found[0] is found[2]
        first = first if first.shape == x.shape else first.mT
        return first * 0.5 + sum((other.sin().mean() for other in others), torch.zeros(()))

    model = Stack(layers(cls=returning(results)), call)
    whole = FUNCTIONS[function](loss(model))
    with spmd.log_compiles():
        found = spmd.jit(whole, (P(), P("data")), P(), mesh=MESH)(state(model), X)
    torch.testing.assert_close(spmd.full_tree(found), whole(state(model), X))
    assert counts(caplog) == ({"Returning": LAYERS - 1 - (function == "vmap of gradient")} if is_reused else {})


def test_grad_mode_that_a_layer_enables(caplog):
    def function(model, x):
        with torch.no_grad():
            x = model(x)
        return x.detach() * (2.0 if x.requires_grad else 1.0)

    def last(layer, x, number):
        found = layer(x)[0]
        return found if number == LAYERS - 1 else found.detach()

    model = Stack(layers(cls=returning(with_gradient)), last)
    assert compare(function, model, X, log=caplog) == {}


def test_buffers_that_are_written(caplog):
    def function(model, x):
        return model(x), [layer.seen for layer in model.layers]

    model = Stack(layers(cls=Buffered))
    with spmd.log_compiles():
        found = spmd.full_tree(spmd.jit(function, (P(), P("data")), P(), mesh=MESH)(model, X))
    torch.testing.assert_close(found, function(Stack(layers(cls=Buffered)), X))
    torch.testing.assert_close([layer.seen for layer in model.layers], found[1])
    assert counts(caplog) == {}


BODIES = {  # what is called with the model, and under which transforms
    "scan": (lambda call, x: spmd.scan(lambda x, _: (call(x), x.sum()), x, None, length=2)[0], FUNCTIONS),
    "fori_loop": (lambda call, x: spmd.fori_loop(0, 2, lambda i, x: call(x) / (1 + i), x), ("gradient of both",)),
    "while_loop": (
        lambda call, x: spmd.while_loop(lambda c: c[1] < 2, lambda c: (call(c[0]), c[1] + 1), (x, torch.tensor(0)))[0],
        ("values", "vmap"),
    ),
    "cond": (lambda call, x: spmd.cond(x.sum() < 100, call, torch.sin, x), ("gradient of both", "vmap")),
    "checkpoint": (
        lambda call, x: spmd.fori_loop(0, 2, lambda i, x: checkpoint(call, x, use_reentrant=False), x),
        ("gradient of both", "vmap of gradient"),
    ),
    "checkpointed scan": (
        lambda call, x: checkpoint(lambda x: spmd.fori_loop(0, 2, lambda i, x: call(x), x), x, use_reentrant=False),
        ("gradient of both",),
    ),
    "nested": (
        lambda call, x: spmd.fori_loop(0, 2, lambda i, x: spmd.fori_loop(0, 2, lambda j, y: call(y) / 2, x), x),
        ("gradient of both",),
    ),
}


@pytest.mark.parametrize(("body", "name"), [(body, name) for body, (_, names) in BODIES.items() for name in names])
def test_layers_in_loops(body, name, caplog):
    model, call = Stack(layers()), BODIES[body][0]

    def function(params, x):
        return (call(lambda x: torch.func.functional_call(model, params, (x,)), x) ** 2).mean()

    whole = FUNCTIONS[name](function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "checkpoint", lambda call, x, use_reentrant: call(x))  # which torch.func refuses
        truth = whole(state(model), X)
    assert set(compare(whole, state(model), X, log=caplog, truth=lambda *args: truth)) == {"Scaled"}


class Summing(Scaled):
    """A layer with a collective, or without it on one device, and a tensor from outside."""

    def forward(self, x):
        total = x.sum((0, 1)) * FACTOR * 0.01
        return super().forward(x) + psum(total, "data").sin() if self.shared else super().forward(x) + total.sin()


def total(model):
    return lambda params, x: (torch.func.functional_call(model, params, (x,)) ** 2).sum()


def outside(transform):
    """A function of which each rank computes its part of the batch, and a transform of it."""

    def function(model):
        each = lambda params, x: psum(total(model)(params, x), "data")  # noqa: E731
        return transform(spmd.shard_map(each, in_specs=(P(), P("data")), out_specs=P()))

    return function


def inside(model):
    """The gradient, which each rank takes of its part of the batch: the sum is that of all."""
    return spmd.shard_map(torch.func.grad(total(model)), in_specs=(P(), P("data")), out_specs=P())


def looped(model):
    """The gradient of a loop in which each rank calls the layers."""

    def each(params, x):
        call = lambda i, x: torch.func.functional_call(model, params, (x,))  # noqa: E731
        return psum((spmd.fori_loop(0, 2, call, x) ** 2).sum(), "data")

    return torch.func.grad(spmd.shard_map(each, in_specs=(P(), P("data")), out_specs=P()))


def unrolled(model):
    twice = Stack([model, model])
    return torch.func.grad(lambda params, x: total(twice)({f"layers.0.{n}": p for n, p in params.items()}, x))


PER_RANK = {  # the function, what it is on one device, and the layers
    "values": (outside(lambda f: f), total, Scaled),
    "gradient": (outside(torch.func.grad), lambda model: torch.func.grad(total(model)), Scaled),
    "gradient with collectives": (outside(torch.func.grad), lambda model: torch.func.grad(total(model)), Summing),
    "gradient inside": (inside, lambda model: torch.func.grad(total(model)), Scaled),
    "loop": (looped, unrolled, Scaled),
    "loop with collectives": (looped, unrolled, Summing),
}


UNEVEN = [pytest.param(name, 3, marks=pytest.mark.slow if "loop" in name else ()) for name in PER_RANK]


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in PER_RANK), *UNEVEN])
def test_layers_in_shard_map(name, size, caplog):
    function, plain, cls = PER_RANK[name]
    mesh = spmd.make_mesh({"data": size}, runtime="virtual")
    expected = plain(Stack(layers(cls=cls)))(state(Stack(layers())), X)
    found = per_rank_both(function(Stack(layers(cls=cls, shared=True))), (state(Stack(layers())), X), mesh)
    torch.testing.assert_close(found, expected)
    assert set(counts(caplog)) == {cls.__name__}


def per_rank_both(function, args, mesh):
    """The value of both programs, equal bit by bit, of equally many collectives."""
    values, collectives = [], []
    for reuse in (False, True):
        jitted = spmd.jit(function, (P(), P("data")), P(), mesh=mesh, reuse_layers=reuse)
        with spmd.log_compiles():
            values.append(spmd.full_tree(jitted(*args)))
        collectives.append(Counter((each.kind, each.axes) for each in jitted.lower(*args).collectives))
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=0)
    assert collectives[0] == collectives[1]
    return values[1]


def test_uneven_meshes(caplog):
    mesh = spmd.make_mesh({"data": 3}, runtime="virtual")
    model = Stack(layers())
    function = torch.func.grad(loss(model))
    with spmd.log_compiles():
        found = spmd.jit(function, (P(), P("data")), P(), mesh=mesh)(state(model), X)
    torch.testing.assert_close(spmd.full_tree(found), function(state(model), X))
    assert counts(caplog) == {"Scaled": LAYERS - 2}


def test_the_option_is_a_flag():
    with pytest.raises(spmd.errors.PlanError, match="reuse_layers must be True or False"):
        spmd.jit(lambda x: x, P(), P(), mesh=MESH, reuse_layers="yes")


def block(params, x, scale=1.0):
    h = F.gelu(F.layer_norm(x, (WIDTH,)) @ params["up"]) @ params["down"]
    return x + (F.softmax(h, -1).sin() * scale).tanh().cos(), {"mean": h.mean()}


def blocks(function):
    """A function of the parameters of layers, of which each is a call of a function."""

    def call(layers, x):
        means = 0.0
        for number, params in enumerate(layers):
            x, found = function(params, x, number)
            means = means + found["mean"]
        return x.square().mean() + means

    return call


def weights():
    torch.manual_seed(0)
    return [{"up": torch.randn(WIDTH, 16), "down": torch.randn(16, WIDTH)} for _ in range(5)]


def by_counter(params, x):
    SCALES.append(SCALES.pop(0))
    return block(params, x, SCALES[0])


def compare_functions(under_jit, call, expected, log):
    """As `compare`, for a function under `jit` that is called by `call` for each layer; truth has it as written."""
    found = []
    for reuse in (False, True):
        SCALES[:] = [1.0, 2.0, 3.0, 4.0]
        jitted = spmd.jit(torch.func.grad(blocks(call(spmd.jit(under_jit)))), mesh=MESH, reuse_layers=reuse)
        with spmd.log_compiles():
            found.append(spmd.full_tree(jitted(weights(), X)))
    SCALES[:] = [1.0, 2.0, 3.0, 4.0]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1], torch.func.grad(blocks(call(under_jit)))(weights(), X))
    assert counts(log) == expected


JITTED = {  # of five calls, the first has another argument: without a gradient
    "equal": (block, lambda f: lambda params, x, number: f(params, x), {"block": 2}),
    "a number": (block, lambda f: lambda params, x, number: f(params, x, 1.0 + number), {}),
    "a number of two": (
        block,
        lambda f: lambda params, x, number: f(params, x, 2.0 if number == 2 else 1.0),
        {"block": 1},
    ),
    "a counter": (by_counter, lambda f: lambda params, x, number: f(params, x), {}),
    "a tensor from outside": (
        lambda params, x: block(params, x * FACTOR),
        lambda f: lambda params, x, number: f(params, x),
        {"<lambda>": 2},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", JITTED)
def test_functions_under_jit_that_are_called_again(name, caplog):
    compare_functions(*JITTED[name], caplog)


def test_the_gradient_of_parameters_that_layers_share_is_summed_over_ranks_once(caplog):
    def whole(params, x, function=block):
        for _ in range(5):
            x = function(params, x)[0]
        return x.square().sum()

    each = lambda params, x: psum(whole(params, x, spmd.jit(block)), "data")  # noqa: E731
    function = torch.func.grad(spmd.shard_map(each, in_specs=(P(), P("data")), out_specs=P()))
    found = per_rank_both(function, (weights()[0], X), MESH)
    torch.testing.assert_close(found, torch.func.grad(whole)(weights()[0], X))
    assert counts(caplog) == {"block": 2}


def test_a_function_under_jit_that_closes_over_what_changes(caplog):
    def function(layers, x):
        scale = torch.ones(())
        inner = spmd.jit(lambda params, x: block(params, x, scale)[0])
        for params in layers:
            x = inner(params, x)
            scale = scale + x.mean()
        return x.square().mean()

    found = [spmd.jit(function, mesh=MESH, reuse_layers=reuse)(weights(), X).full_tensor() for reuse in (False, True)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch itself
def test_per_sample_gradients_of_attention(caplog):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True), LAYERS)
    by_item = FUNCTIONS["vmap of gradient"](lambda p, x: loss(model)(p, x[None]))
    assert compare(by_item, state(model), X, log=caplog) == {"TransformerEncoderLayer": LAYERS - 2}
