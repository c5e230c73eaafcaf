import warnings

import pytest
import torch

import spmd
from spmd import P
from spmd.errors import SpmdError
from spmd.optim import AdamWState, adamw, apply_updates, clip_by_global_norm, global_norm, master_weights, sgd

MESH = spmd.make_mesh({"x": 2}, runtime="virtual")

SHAPES = {"w": (4, 3), "b": (3,), "scale": (), "none": (0, 2)}


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def by_updates(optimizer):
    """A step by way of updates."""

    def step(params, state, grads):
        updates, state = optimizer.update(grads=grads, state=state, params=params)
        return apply_updates(params, updates), state

    return step


def run(optimizer, steps=4, by=lambda optimizer: optimizer.step):
    """Parameters after some steps of the optimizer under test."""
    params, step = draw(0), by(optimizer)
    state = optimizer.init(params)
    for number in range(steps):
        params, state = step(params, state, draw(number + 1))
    return params


def run_torch(make, steps=4, clip=None):
    """Parameters after the same steps of one of torch's optimizers."""
    params = {name: torch.nn.Parameter(value) for name, value in draw(0).items()}
    optimizer = make(list(params.values()))
    for step in range(steps):
        for name, grad in draw(step + 1).items():
            params[name].grad = grad
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(params.values(), clip)
        optimizer.step()
    return {name: value.detach() for name, value in params.items()}


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "weight_decay": 0.3}]
)
def test_sgd_is_torchs(lr, options):
    torch.testing.assert_close(run(sgd(lr, **options)), run_torch(lambda p: torch.optim.SGD(p, lr=0.1, **options)))


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.5)])
@pytest.mark.parametrize(("eps", "weight_decay"), [(1e-8, 0.0), (0.1, 0.2)])
def test_adamw_is_torchs(lr, betas, eps, weight_decay):
    expected = run_torch(lambda p: torch.optim.AdamW(p, lr=0.01, betas=betas, eps=eps, weight_decay=weight_decay))
    torch.testing.assert_close(run(adamw(lr, *betas, eps, weight_decay)), expected)


def test_adamw_keeps_torchs_moments():
    params, optimizer = draw(0), adamw()
    state = optimizer.init(params)
    parameter = torch.nn.Parameter(params["w"].clone())
    reference = torch.optim.AdamW([parameter], weight_decay=0.0)
    for step in range(3):
        grads = draw(step + 1)
        params, state = optimizer.step(params, state, grads)
        parameter.grad = grads["w"]
        reference.step()
    kept = reference.state[parameter]
    torch.testing.assert_close(state.mean["w"], kept["exp_avg"])
    torch.testing.assert_close(state.square["w"], kept["exp_avg_sq"])
    assert state.step.item() == 3


def test_first_step_is_exact_where_a_difference_would_cancel():
    # After one step m / c1 is the gradient and v / c2 its square: the parameter moves by lr, whatever the gradient.
    params, optimizer = torch.zeros(3), adamw(lr=1.0, b2=0.9999)
    params, _ = optimizer.step(params, optimizer.init(params), torch.tensor([0.1, 1.0, -1e3]))
    torch.testing.assert_close(params, torch.tensor([-1.0, -1.0, 1.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_is_torchs(max_norm):
    expected = run_torch(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), clip=max_norm)
    torch.testing.assert_close(run(clip_by_global_norm(max_norm, sgd(0.1, 0.9))), expected)


def test_global_norm_of_all_leaves():
    tree = draw(3)
    expected = torch.cat([leaf.reshape(-1) for leaf in tree.values()]).norm()
    torch.testing.assert_close(global_norm(tree), expected)


@pytest.mark.parametrize("optimizer", [sgd(0.1, 0.9), adamw(), clip_by_global_norm(0.1, adamw(weight_decay=0.1))])
def test_updates_are_steps(optimizer):
    torch.testing.assert_close(run(optimizer, by=by_updates), run(optimizer), rtol=0, atol=0)


def test_the_order_of_optax():
    """A file for optax, of which only the imports are other ones."""
    params, optimizer = torch.tensor(1.0), sgd(0.1)
    with pytest.warns(FutureWarning, match=r"takes optax's order, `updates, state = update\(grads, state, params\)`"):
        updates, _ = optimizer.update(torch.tensor(1.0), optimizer.init(params), params)
    torch.testing.assert_close(apply_updates(params, updates), torch.tensor(0.9))


def test_a_call_by_position_warns_once_for_each_line():
    optimizer, x = sgd(0.1), torch.ones(2)

    def here():
        optimizer.update(x, optimizer.init(x), x)

    def there():
        optimizer.update(x, optimizer.init(x))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            here()
            there()
            optimizer.update(grads=x, state=optimizer.init(x), params=x)
    lines = [function.__code__.co_firstlineno + 1 for function in (here, there)]
    assert [(__file__, line) for line in lines] == [(item.filename, item.lineno) for item in found]


def test_a_jitted_call_by_position_warns_as_another():
    optimizer, x = adamw(0.1), torch.ones(4)
    state = optimizer.init(x)
    update = spmd.jit(optimizer.update, mesh=MESH)
    expected, _ = optimizer.update(grads=x, state=state, params=x)
    found, _ = update(grads=x, state=state, params=x)
    torch.testing.assert_close(found.full_tensor(), expected)
    with pytest.warns(FutureWarning, match="name the arguments") as told:
        found, _ = spmd.jit(optimizer.update, mesh=MESH)(x, state, x)
    assert __file__ == told[0].filename
    torch.testing.assert_close(found.full_tensor(), expected)


def test_parameters_that_are_not_read_may_be_left_out():
    grads = draw(1)
    for optimizer in (sgd(0.1, 0.9), adamw(), clip_by_global_norm(0.1, adamw())):
        state = optimizer.init(grads)
        without, _ = optimizer.update(grads=grads, state=state)
        torch.testing.assert_close(without, optimizer.update(grads=grads, state=state, params=draw(0))[0])
    for optimizer in (sgd(0.1, weight_decay=0.1), adamw(weight_decay=0.1), master_weights(sgd(0.1))):
        with pytest.raises(SpmdError, match=r"reads the parameters \(got params=None\)"):
            optimizer.update(grads=grads, state=optimizer.init(grads))


@pytest.mark.parametrize(
    "optimizer", [sgd(0.1), sgd(0.1, 0.9, weight_decay=0.1), adamw(), clip_by_global_norm(0.1, adamw(weight_decay=0.1))]
)
def test_updates_that_are_applied_are_one_program_with_a_step(optimizer):
    params, grads = draw(0), draw(1)
    args = params, optimizer.init(params), grads

    def train_step(params, state, grads):
        return optimizer.step(params, state, grads)

    by_step = spmd.jit(train_step, mesh=MESH)

    def train_step(params, state, grads):
        updates, state = optimizer.update(grads=grads, state=state, params=params)
        return apply_updates(params, updates), state

    assert by_step.lower(*args).as_text() == spmd.jit(train_step, mesh=MESH).lower(*args).as_text()


@pytest.mark.parametrize("optimizer", [sgd(0.1, 0.9, weight_decay=0.1), adamw(), adamw(0.1, weight_decay=0.1)])
def test_updates_that_are_read_elsewhere(optimizer):
    params, grads = draw(0), draw(1)
    args = params, optimizer.init(params), grads

    def train_step(params, state, grads):
        updates, state = optimizer.update(grads=grads, state=state, params=params)
        return apply_updates(params, updates), state, global_norm(updates), updates

    specs = torch.utils._pytree.tree_map(lambda x: P("x") if x.ndim else P(), args)
    found = spmd.full_tree(spmd.jit(train_step, specs, mesh=MESH)(*args))
    torch.testing.assert_close(found, train_step(*args))


def test_updates_have_the_dtype_of_parameters():
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    assert apply_updates(params, {"w": torch.ones(3)})["w"].dtype is torch.bfloat16
    with pytest.raises(SpmdError, match="updates must be a pytree like params"):
        apply_updates(params, {"v": torch.ones(3)})


@pytest.mark.parametrize("optimizer", [sgd(0.1, 0.9), adamw(), clip_by_global_norm(0.1, adamw(weight_decay=0.1))])
def test_nothing_is_mutated(optimizer):
    params, grads = draw(0), draw(1)
    state = optimizer.init(params)
    optimizer.step(params, state, grads)
    torch.testing.assert_close(params, draw(0), rtol=0, atol=0)
    torch.testing.assert_close(grads, draw(1), rtol=0, atol=0)
    assert all(not leaf.any() for leaf in torch.utils._pytree.tree_leaves(state))


def test_master_weights_keep_what_rounding_would_lose():
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    single = {"w": torch.ones(3)}
    optimizer, plain = master_weights(adamw(1e-4)), adamw(1e-4)
    state, expected = optimizer.init(params), plain.init(single)
    for _ in range(50):
        params, state = optimizer.step(params, state, {"w": torch.ones(3, dtype=torch.bfloat16)})
        single, expected = plain.step(single, expected, {"w": torch.ones(3)})
    torch.testing.assert_close(state.params, single, rtol=0, atol=0)
    torch.testing.assert_close(params["w"], single["w"].bfloat16(), rtol=0, atol=0)
    assert (params["w"] < 1).all()


def test_updates_of_master_weights_give_the_rounded_copy():
    params = {name: value.bfloat16() for name, value in draw(0).items()}
    for optimizer in (master_weights(adamw(0.1)), clip_by_global_norm(0.5, master_weights(sgd(0.1, 0.9)))):
        expected = found = params, optimizer.init(params)
        jitted = found
        step = spmd.jit(by_updates(optimizer), mesh=MESH)
        for number in range(4):
            grads = {name: value.bfloat16() for name, value in draw(number + 1).items()}
            expected, found = optimizer.step(*expected, grads), by_updates(optimizer)(*found, grads)
            jitted = step(*jitted, grads)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(spmd.full_tree(jitted), expected)


def test_number_of_operators_does_not_grow_with_parameters():
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def calls(number):
        optimizer, params = adamw(), [torch.ones(2) for _ in range(number)]
        state = optimizer.init(params)
        with Count() as count:
            optimizer.step(params, state, params)
        return count.calls

    assert calls(1) == calls(40)
    assert calls(1) <= 24


def test_empty_tree():
    optimizer = clip_by_global_norm(1.0, adamw())
    params, state = optimizer.step({}, optimizer.init({}), {})
    assert params == {}
    assert isinstance(state, AdamWState)


def test_errors():
    params, optimizer = draw(0), adamw()
    with pytest.raises(SpmdError, match="grads must be a pytree like params"):
        optimizer.step(params, optimizer.init(params), {"w": params["w"]})
    with pytest.raises(SpmdError, match="needs momentum"):
        sgd(0.1, nesterov=True)
    with pytest.raises(SpmdError, match=r"positive max_norm \(got 0\)"):
        clip_by_global_norm(0, sgd(0.1))
    with pytest.raises(SpmdError, match="empty pytree"):
        global_norm([])
    with pytest.raises(SpmdError, match=r"floating dtype \(got torch.int32\)"):
        master_weights(adamw(), torch.int32)
    bfloat16 = {name: value.bfloat16() for name, value in params.items()}
    with pytest.raises(SpmdError, match="grads must be a pytree like params"):
        master_weights(adamw()).step(bfloat16, master_weights(adamw()).init(bfloat16), {"w": params["w"]})
