"""Calls of jitted functions: specs that are left out, arguments by name, defaults, methods, and callables."""

import copy
import functools
import pickle

import pytest
import torch

import spmd
from spmd import P
from spmd.errors import MeshError, PlanError, ShardingError, TraceError

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")


def values(seed=0, *shape):
    return torch.randn(shape or (6, 4), generator=torch.Generator().manual_seed(seed))


def placed(x, *dims):
    return spmd.distribute(x, P(*dims), MESH)


def equal(found, expected):
    torch.testing.assert_close(found.full_tensor(), expected)


def affine(x, w, *, scale=1, shift=None):
    y = scale * (x @ w)
    return y if shift is None else y + shift


def test_without_in_specs_dtensors_keep_their_specs_and_plain_tensors_are_replicated() -> None:
    traces = []

    @spmd.jit(mesh=MESH)
    def f(x, w):
        traces.append(1)
        return x @ w

    x, w = values(0, 6, 4), values(1, 4, 4)
    equal(f(placed(x, "data"), w), x @ w)
    assert [spec.pspec for spec in f.compile(placed(x, "data"), w).in_specs] == [P("data"), P()]
    equal(f(placed(x, None, "model"), placed(w, "model")), x @ w)
    equal(f(x, w), x @ w)
    equal(f(placed(x, "data"), w), x @ w)
    assert len(traces) == 3  # one for each pair of specs


@pytest.mark.parametrize(
    "specs", [(P("data"), None), (P("data"),), {"x": P("data")}, {"x": P("data"), "scale": None}], ids=str
)
def test_specs_may_be_left_out_in_part(specs) -> None:
    def f(x, w=None, scale=None):
        return x * 2 if w is None else x @ w

    x, w = values(0), values(1, 4, 4)
    jitted = spmd.jit(f, specs, mesh=MESH)
    if specs != (P("data"),):
        args = x, placed(w, None, "model")
        assert [spec.pspec for spec in jitted.compile(*args).in_specs] == [P("data"), P(None, "model")]
        equal(jitted(*args), x @ w)
    equal(jitted(x), 2 * x)


def test_gradients_flow_where_no_specs_are_given() -> None:
    x, w = values(0), values(1, 4, 4)
    loss = spmd.jit(lambda x, w: (x @ w).square().sum(), mesh=MESH)
    found = torch.func.grad(loss, argnums=(0, 1))(placed(x, "data"), placed(w, None, "model"))
    expected = torch.func.grad(lambda x, w: (x @ w).square().sum(), argnums=(0, 1))(x, w)
    for one, other in zip(found, expected, strict=True):
        equal(one, other)


def test_the_mesh_is_that_of_the_first_dtensor() -> None:
    f = spmd.jit(lambda x, y: x + y)
    x = values()
    assert f(x, placed(x, "data")).mesh == MESH
    other = spmd.make_mesh({"i": 2}, runtime="virtual")
    assert f(spmd.distribute(x, P("i"), other), x).mesh == other
    with pytest.raises(MeshError, match="No mesh was given"):
        f(x, x)
    with pytest.raises(MeshError, match="is on Mesh"):
        f(placed(x, "data"), spmd.distribute(x, P("i"), other))


@pytest.mark.parametrize("call", ["args", "names", "order", "mixed"])
def test_arguments_go_by_name(call) -> None:
    f = spmd.jit(affine, (P("data"), P()), mesh=MESH, static_argnames="scale")
    x, w, shift = values(0), values(1, 4, 4), values(2, 4)
    found = {
        "args": lambda: f(x, w, scale=3, shift=shift),
        "names": lambda: f(x=x, w=w, scale=3, shift=shift),
        "order": lambda: f(shift=shift, scale=3, w=w, x=x),
        "mixed": lambda: f(x, shift=shift, w=w, scale=3),
    }[call]
    equal(found(), 3 * (x @ w) + shift)
    equal(found(), 3 * (x @ w) + shift)


def test_calls_of_one_meaning_share_a_program_and_others_do_not() -> None:
    traces = []

    def f(x, y=None, *, a=None, b=None):
        traces.append(1)
        return x + (0 if a is None else 2 * a) + (0 if b is None else 3 * b) + (0 if y is None else 5 * y)

    jitted, x = spmd.jit(f, mesh=MESH), values()
    for _ in range(2):
        equal(jitted(x, x), 6 * x)
        equal(jitted(x, y=x), 6 * x)
        equal(jitted(y=x, x=x), 6 * x)
        equal(jitted(x, a=x), 3 * x)
        equal(jitted(x, b=x), 4 * x)
        equal(jitted(x, b=x, a=x), 6 * x)
        equal(jitted(x, a=x, b=x), 6 * x)
    assert len(traces) == 4


def test_keyword_only_specs_and_var_keywords() -> None:
    def f(**tensors):
        return tensors["a"] @ tensors["b"]

    x, w = values(0), values(1, 4, 4)
    jitted = spmd.jit(f, {"a": P("data"), "b": P(None, "model")}, P("data"), mesh=MESH)
    assert [spec.pspec for spec in jitted.compile(a=x, b=w).in_specs] == [P("data"), P(None, "model")]
    equal(jitted(b=w, a=x), x @ w)
    program = jitted.trace(a=x, b=w)
    assert program.input_paths == ("a", "b")


def test_a_gap_left_to_a_default_and_positions_after_it() -> None:
    def f(x, scale=2, shift=None):
        return scale * x + (0 if shift is None else shift)

    x = values()
    jitted = spmd.jit(f, mesh=MESH, static_argnames="scale")
    equal(jitted(x, shift=x), 3 * x)
    equal(jitted(x, 5, x), 6 * x)
    equal(jitted(x, scale=5, shift=x), 6 * x)


def test_static_names_and_numbers() -> None:
    def f(x, kind, *, times):
        assert isinstance(kind, str) and isinstance(times, int)
        return {"double": 2 * x, "negate": -x}[kind] * times

    x = values()
    by_name = spmd.jit(f, mesh=MESH, static_argnames=("kind", "times"))
    equal(by_name(x, "double", times=3), 6 * x)
    equal(by_name(x, kind="negate", times=3), -3 * x)
    both = spmd.jit(f, mesh=MESH, static_argnums=1, static_argnames="times")
    equal(both(x, "negate", times=1), -x)
    equal(spmd.jit(f, mesh=MESH)(x, "double", times=3), 6 * x)  # what holds no tensors is static without being named
    with pytest.raises(ShardingError, match="argument times is no tensor"):
        spmd.jit(f, mesh=MESH)(x, "double", times=object())
    with pytest.raises(TraceError, match="static_argnames names 'size'"):
        spmd.jit(f, mesh=MESH, static_argnames="size")


def test_donated_arguments_by_name() -> None:
    x = placed(values(), "data")
    f = spmd.jit(lambda w, x: x * 2, mesh=MESH, donate_argnums=1)
    f(values(1), x=x)
    with pytest.raises(ShardingError, match="donated"):
        x.full_tensor()


def test_wrong_calls_are_refused() -> None:
    f = spmd.jit(affine, mesh=MESH)
    x = values()
    with pytest.raises(TraceError, match="missing a required argument: 'w'"):
        f(x)
    with pytest.raises(TraceError, match="unexpected keyword argument 'size'"):
        f(x, x, size=x)
    with pytest.raises(TraceError, match="multiple values for argument 'x'"):
        f(x, x, x=x)
    with pytest.raises(ShardingError, match="in_specs names 'weight', but affine has the parameters x, w"):
        spmd.jit(affine, {"weight": P()}, mesh=MESH)
    with pytest.raises(ShardingError, match="in_specs does not fit the arguments"):
        spmd.jit(affine, (P(), P(), P()), mesh=MESH)(x, x)
    with pytest.raises(PlanError, match="in_shardings is JAX's name of in_specs"):
        spmd.jit(affine, in_specs=P(), in_shardings=P(), mesh=MESH)


def test_jax_names_of_specs() -> None:
    x, w = values(0), values(1, 4, 4)
    f = spmd.jit(affine, in_shardings=(P("data"), P()), out_shardings=P("data"), mesh=MESH)
    equal(f(x, w), x @ w)
    assert f(x, w).spec.pspec == P("data")
    g = spmd.jit(in_shardings=(P("data"), P()), mesh=MESH)(affine)
    equal(g(x, w), x @ w)


def test_stages_take_names_too() -> None:
    f = spmd.jit(affine, {"x": P("data")}, mesh=MESH, static_argnames="scale")
    x, w = values(0), values(1, 4, 4)
    compiled = f.compile(x, w, scale=2)
    equal(compiled(x, w, scale=2), 2 * (x @ w))
    equal(compiled(x, scale=2, w=w), 2 * (x @ w))
    with pytest.raises(TraceError, match="compiled for arguments 0, 1, scale"):
        compiled(x, w)
    assert f.plan(w=w, x=x, scale=2).mesh == MESH


def test_inside_of_another_function_and_uncompiled() -> None:
    inner = spmd.jit(affine, {"x": P("data")}, mesh=MESH, static_argnames="scale")
    outer = spmd.jit(lambda x, w: inner(x, w=w, scale=2).sum(), mesh=MESH)
    x, w = values(0), values(1, 4, 4)
    equal(outer(x, w), 2 * (x @ w).sum())
    with spmd.disable_jit():
        equal(inner(x, w=placed(w, "model"), scale=2), 2 * (x @ w))


class Model:
    def __init__(self, w):
        self.w = w

    @spmd.jit({"x": P("data")}, mesh=MESH)
    def step(self, x, *, shift=None):
        y = x @ self.w
        return y if shift is None else y + shift


def test_methods() -> None:
    x, one, other = values(0), Model(values(1, 4, 4)), Model(values(2, 4, 4))
    for _ in range(2):
        equal(one.step(x), x @ one.w)
        equal(other.step(x, shift=x), x @ other.w + x)
    assert one.step is one.step and one.step is not other.step
    assert isinstance(Model.step, type(one.step))


class Scaling:
    by = 3

    @classmethod
    @spmd.jit({"x": P("data")}, mesh=MESH)
    def of_the_class(cls, x, *, lr=1.0):
        return cls.by * lr * x

    @staticmethod
    @spmd.jit({"x": P("data")}, mesh=MESH)
    def of_nothing(x, *, lr=1.0):
        return lr * x


class More(Scaling):
    by = 5


def test_class_methods_and_static_methods() -> None:
    x = values(0)
    for _ in range(2):
        equal(Scaling.of_the_class(x, lr=2.0), 6 * x)
        equal(More().of_the_class(x), 5 * x)
        equal(Scaling.of_nothing(x, lr=2.0), 2 * x)
        equal(More().of_nothing(x), x)
    leaf = placed(x, "data").requires_grad_()
    More.of_the_class(leaf, lr=2.0).square().sum().backward()
    equal(leaf.grad, 200 * x)


def loss_of(x, w, *, scale=1.0, shift=None):
    return affine(x, w, scale=scale, shift=shift).square().sum()


class Losses:
    def __init__(self, w):
        self.w = w

    @spmd.jit({"x": P("data")}, mesh=MESH)
    def loss(self, x, w, *, scale=1.0, shift=None):
        return loss_of(x, self.w @ w, scale=scale, shift=shift)

    def __call__(self, x, w, *, scale=1.0, shift=None):
        return loss_of(x, self.w @ w, scale=scale, shift=shift)


def rest(*tensors, **named):
    return loss_of(*tensors, shift=named["shift"] * named["more"], scale=named["scale"])


IDENTITY = torch.eye(4)
CALLS = {
    "positions and names": (lambda: spmd.jit(loss_of, mesh=MESH), lambda f, x, w, s: f(x, w, shift=s, scale=0.5)),
    "names": (
        lambda: spmd.jit(loss_of, {"x": P("data"), "shift": P("model")}, mesh=MESH),
        lambda f, x, w, s: f(scale=0.5, shift=s, w=w, x=x),
    ),
    "static names": (
        lambda: spmd.jit(loss_of, mesh=MESH, static_argnames="scale"),
        lambda f, x, w, s: f(x, w, scale=0.5, shift=s),
    ),
    "JAX's names": (
        lambda: spmd.jit(loss_of, in_shardings={"x": P("data")}, out_shardings=P(), mesh=MESH),
        lambda f, x, w, s: f(x, w, scale=0.5, shift=s),
    ),
    "any": (lambda: spmd.jit(rest, mesh=MESH), lambda f, x, w, s: f(x, w, scale=0.5, shift=s, more=0.5 * s)),
    "a partial": (
        lambda: spmd.jit(functools.partial(loss_of, scale=0.5), {"x": P("data")}, mesh=MESH),
        lambda f, x, w, s: f(x, w, shift=s),
    ),
    "a method": (lambda: Losses(IDENTITY).loss, lambda f, x, w, s: f(x, w, shift=s, scale=0.5)),
    "a callable": (lambda: spmd.jit(Losses(IDENTITY), mesh=MESH), lambda f, x, w, s: f(x, w, shift=s)),
    "defaults": (lambda: spmd.jit(loss_of, mesh=MESH), lambda f, x, w, s: f(x, w) + s.sum()),
}


@pytest.mark.parametrize("form", CALLS)
def test_gradients_are_those_of_one_device_in_every_form_of_a_call(form) -> None:
    make, call = CALLS[form]
    f = make()
    of_one_device = {"a method": Losses(IDENTITY)}.get(form) or f.__wrapped__
    tensors = values(0, 5, 4), values(1, 4, 3), values(2, 3)  # uneven over both axes
    specs = (("data",), (None, "model"), ("model",))
    if form not in ("names", "a method"):
        specs = (("data",), ("model",), ())
    expected = torch.func.grad(lambda *given: call(of_one_device, *given), argnums=(0, 1, 2))(*tensors)
    leaves = [placed(x, *spec).requires_grad_() for x, spec in zip(tensors, specs, strict=True)]
    gradients = torch.func.grad(lambda *given: call(f, *given), argnums=(0, 1, 2))
    backward = torch.autograd.grad(call(f, *leaves), leaves)
    outside, inside = gradients(*(leaf.detach() for leaf in leaves)), spmd.jit(gradients, mesh=MESH)(*tensors)
    assert [leaf.spec for leaf in leaves] == [gradient.spec for gradient in backward]
    for found in (backward, outside, inside):
        for one, wanted in zip(found, expected, strict=True):
            equal(one, wanted)


def test_copies_and_pickles_of_instances_have_methods_of_their_own() -> None:
    x, one = values(0), Model(values(1, 4, 4))
    one.step(x)
    for made in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        made.w = 2 * one.w
        equal(made.step(x), 2 * (x @ one.w))
    equal(one.step(x), x @ one.w)


def test_an_instance_that_cannot_keep_programs_is_refused() -> None:
    class Slotted:
        __slots__ = ()
        step = spmd.jit(lambda self, x: x, mesh=MESH)

    with pytest.raises(TraceError, match="no __dict__"):
        Slotted().step(values())


def test_partials_and_callables() -> None:
    class Scaled:
        def __call__(self, x, *, by=2):
            return by * x

    x = values()
    equal(spmd.jit(functools.partial(affine, scale=3), mesh=MESH)(x, values(1, 4, 4)), 3 * (x @ values(1, 4, 4)))
    equal(spmd.jit(Scaled(), {"x": P("data")}, mesh=MESH, static_argnames="by")(x, by=5), 5 * x)
    equal(spmd.jit(torch.add, mesh=MESH)(x, x), 2 * x)


def test_a_decorator_without_arguments() -> None:
    @spmd.jit
    def f(x):
        return x + 1

    x = values()
    equal(f(placed(x, "data")), x + 1)
    with spmd.use_mesh(MESH):
        equal(f(x), x + 1)


def test_a_function_gets_by_name_what_the_call_gives_by_name():
    seen = []

    def layer(x, w):
        return x @ w

    @functools.wraps(layer)
    def decorated(*args, **keywords):
        seen.append((len(args), list(keywords)))
        return layer(*args, **keywords)

    x, w = torch.ones(4, 6), torch.ones(6, 8)
    step = spmd.jit(decorated, {"w": P("data")}, mesh=MESH)
    for found in (step(x, w=w), step(w=w, x=x), step(x, w)):
        torch.testing.assert_close(found.full_tensor(), x @ w)
    assert ([(1, ["w"])], 1) == (seen, step.cache_info().misses)
