"""What a function under jit changes beside its results: refused with its line, and undone."""

import gc

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import P
from spmd.core.spec import TensorMeta
from spmd.ir.effectful import effectful_form
from spmd.tracing.torch_state import TorchState
from spmd.tracing.trace import trace

META = TensorMeta((4, 3), torch.float32)
CLOSED = torch.ones(4, 3)
MESH = spmd.make_mesh({"data": 2}, runtime="virtual")


def seeds(x):
    y = x + 1
    torch.manual_seed(0)  # changes
    return y + torch.rand(3)


def seeds_at_the_end(x):
    y = x + torch.rand(3)
    torch.manual_seed(0)  # changes
    return y


def sets_the_state(x):
    torch.set_rng_state(torch.Generator().manual_seed(5).get_state())  # changes
    return x


def sets_the_default_dtype(x):
    with torch.autocast("cpu"):
        y = x @ x.T
    torch.set_default_dtype(torch.float64)  # changes
    return y + 1


def sets_it_in_a_helper(x):
    return helper(x).sum()


def helper(x):
    if x.shape[0] > 2:
        torch.use_deterministic_algorithms(True)  # changes
    return x.sin()


def enters_autocast(x):
    torch.autocast("cpu").__enter__()  # changes
    return x + 1


def sets_the_grad_mode(x):
    torch.set_grad_enabled(False)  # changes
    return x * 2


def sets_the_device(x):
    torch.set_default_device("cpu")  # changes
    return x * 2


def sets_the_precision(x):
    torch.set_float32_matmul_precision("high")  # changes
    return x @ x.T


def seeds_for_a_draw(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return x + torch.rand(3)  # changes


def gives_other_memory(x):
    y = x + 1
    y.data = x * 2  # changes
    return y


def gives_the_argument_other_memory(x):
    x.data = x * 2  # changes
    return x


def keeps_a_gradient(x):
    y = x + 1
    y.grad = x  # changes
    return y


def marks_what_is_closed_over(x):
    CLOSED.requires_grad_()  # changes
    return x * CLOSED


def converts_a_module(x):
    return torch.nn.Linear(3, 3).double()(x.double())  # changes


def linearizes_draws(x):
    return torch.func.linearize(lambda a: F.dropout(a, 0.5), x)[1](x)  # changes


FUNCTIONS = [
    (seeds_at_the_end, "torch's random generator"),
    (sets_the_state, "torch's random generator"),
    (sets_the_default_dtype, "the default dtype"),
    (sets_it_in_a_helper, "the deterministic mode"),
    (enters_autocast, "autocast"),
    (sets_the_grad_mode, "the grad mode"),
    (sets_the_device, "the default device"),
    (sets_the_precision, "the precision of float32 products"),
    (gives_other_memory, "x.data = ... at"),
    (gives_the_argument_other_memory, "x.data = ... at"),
    (keeps_a_gradient, "x.grad = ... at"),
    (marks_what_is_closed_over, "requires_grad_ at"),
    (seeds_for_a_draw, "seeded the generator"),
    (linearizes_draws, "draws random numbers"),
]


@pytest.mark.parametrize(("function", "text"), FUNCTIONS, ids=lambda item: getattr(item, "__name__", ""))
def test_changes_are_refused_with_their_line_and_undone(function, text):
    before, numbers = TorchState.now(), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(spmd.TraceError) as error:
            spmd.jit(function, P("data"), P(), mesh=MESH)(torch.ones(4, 3))
        assert text in str(error.value)
        assert "test_effects.py:" in str(error.value)
        assert "# changes`" in str(error.value)
        assert () == before.changed()
        assert torch.equal(numbers, torch.get_rng_state())
    assert not CLOSED.requires_grad


def test_draws_after_the_generator_was_set_are_refused():
    with pytest.raises(spmd.TraceError, match="after the function has seeded the generator"):
        trace(seeds, (META,))


def restores(x):
    with torch.autocast("cpu"), torch.enable_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        y = x.detach().requires_grad_()
        (z,) = torch.autograd.grad((y @ y.T).sum(), y)
    state = torch.get_rng_state()
    torch.set_rng_state(state)
    return z + torch.rand(3), F.dropout(x, 0.5)


def test_what_is_restored_is_no_change():
    torch.manual_seed(3)
    expected = restores(torch.ones(4, 3))
    jitted = spmd.jit(restores, P("data"), P(), mesh=MESH)
    for _ in range(2):
        torch.manual_seed(3)
        for actual, wanted in zip(jitted(torch.ones(4, 3)), expected, strict=True):
            torch.testing.assert_close(actual.full_tensor(), wanted, check_dtype=True)


def test_the_line_is_found_under_a_debugger():
    import sys

    seen = []
    sys.settrace(lambda frame, event, arg: seen.append(event))
    try:
        with pytest.raises(spmd.TraceError, match="# changes`"):
            trace(sets_the_grad_mode, (META,))
        found = sys.gettrace()
    finally:
        sys.settrace(None)
    assert found is not None and seen


def test_a_callback_of_garbage_collection_is_no_line_of_the_function():
    def called_back(phase, info):
        assert phase in ("start", "stop")

    def function(x):
        y = x + 1
        torch.manual_seed(0)  # changes
        for _ in range(3000):
            y = [y]  # objects enough for a collection
        return x

    threshold = gc.get_threshold()
    gc.callbacks.append(called_back)
    gc.set_threshold(1)
    try:
        with pytest.raises(spmd.TraceError) as error:
            trace(function, (META,))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(called_back)
    assert f"test_effects.py:{function.__code__.co_firstlineno + 2} " in str(error.value)


def test_an_operator_whose_first_use_is_interrupted_can_be_used(monkeypatch):
    """torch defines an operator once: what an interrupt leaves half defined is taken back."""
    library = torch.library.Library("spmd_interrupted", "FRAGMENT")
    library.define("log(Tensor x) -> ()")
    library.impl("log", lambda x: None, "CompositeExplicitAutograd")
    register = torch.library.register_fake

    def interrupted(name, *args, **options):
        if "spmd_effectful" in name:
            raise KeyboardInterrupt
        return register(name, *args, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch.library, "register_fake", interrupted)
        effectful_form(torch.ops.spmd_interrupted.log.default)
    assert torch.empty(0).shape == effectful_form(torch.ops.spmd_interrupted.log.default)(torch.ones(2)).shape
