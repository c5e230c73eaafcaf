"""Whatever fails in a trace leaves torch as it was."""

import gc

import pytest
import torch

import spmd
from spmd import P
from spmd.core.spec import TensorMeta
from spmd.tracing.torch_state import TorchState, restored
from spmd.tracing.trace import trace

META = TensorMeta((4, 3), torch.float32)
MESH = spmd.make_mesh({"data": 2}, runtime="virtual")


def raises(x):
    raise ZeroDivisionError


def multiplies_shapes_that_do_not_fit(x):
    return x @ x


def asks_for_a_number(x):
    return x * x.sum().item()


def asks_for_places(x):
    return x.nonzero().sum() * x


def reads_memory(x):
    return x * x.numpy().sum()


def writes_to_the_argument(x):
    CLOSED.add_(1)
    return x


def draws_from_its_own_generator(x):
    return x + torch.rand(x.shape, generator=torch.Generator())


def fails_under_a_guard_that_its_frame_holds(x):
    torch._tensor_str._str(3)  # the frame of _str holds torch._C._DisableFuncTorch


def fails_in_contexts(x):
    with torch.autocast("cpu"), torch.enable_grad(), torch.device("meta"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        raise ZeroDivisionError


def fails_in_a_transform_of_its_own(x):
    return torch.func.jvp(lambda y: torch.func.vmap(raises)(y), (x,), (x,))


CLOSED = torch.ones(3)
BODIES = [
    raises,
    multiplies_shapes_that_do_not_fit,
    asks_for_a_number,
    asks_for_places,
    reads_memory,
    writes_to_the_argument,
    draws_from_its_own_generator,
    fails_under_a_guard_that_its_frame_holds,
    fails_in_contexts,
    fails_in_a_transform_of_its_own,
]
TRANSFORMS = {
    "none": lambda f: f,
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](x),
    "vmap": lambda f: lambda x: torch.func.vmap(f)(torch.stack([x, x])),
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).sum()),
}


def works(x):
    """What plain torch.func gives."""
    square = lambda y: (y * y).sum()  # noqa: E731
    vmapped = torch.func.vmap(torch.func.grad(square))(x)
    return torch.func.jvp(torch.sin, (x,), (x,))[1], vmapped, torch.func.hessian(square)(x[0])


@pytest.fixture(scope="module")
def few_objects():
    """Leaves what collection and the tests before these made out of their many garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("body", BODIES)
def test_a_failed_trace_leaves_torch_as_it_was(body, transform):
    x = torch.arange(12.0).reshape(4, 3)
    expected, state = works(x), TorchState.now()
    function = TRANSFORMS[transform](body)
    messages = []
    for _ in range(2):
        with pytest.raises(Exception) as error:  # of many types: what is tested is what stays behind
            trace(function, (META,))
        messages.append(f"{error.type} {error.value}")
        assert () == state.changed()
        del error
        gc.collect()
        assert () == state.changed()
        for actual, wanted in zip(works(x), expected, strict=True):
            assert torch.equal(actual, wanted)
    assert messages[0] == messages[1]


def test_jvp_of_quantile():
    """Torch's meta kernel of lerp_ prints its operands, which forward mode cannot do below functionalization."""
    function = lambda x: torch.func.jvp(lambda v: v.quantile(0.3, dim=1), (x,), (x.sin(),))  # noqa: E731
    x = torch.randn(4, 3)
    jitted = spmd.jit(function, P("data"), P("data"), mesh=MESH)
    for _ in range(2):
        for actual, expected in zip(jitted(x), function(x), strict=True):
            torch.testing.assert_close(actual.full_tensor(), expected)


@pytest.mark.parametrize("weight", [0.25, torch.tensor(0.25), torch.linspace(0, 1, 3)])
def test_jvp_of_lerp_in_place(weight):
    function = lambda x: torch.func.jvp(lambda v: v.sin().lerp_(v, weight), (x,), (x.cos(),))  # noqa: E731
    x = torch.randn(4, 3)
    for actual, expected in zip(spmd.jit(function, P("data"), P("data"), mesh=MESH)(x), function(x), strict=True):
        torch.testing.assert_close(actual.full_tensor(), expected)


def change_everything():
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch._C._set_cudnn_benchmark(True)  # importing torch.testing's internals freezes torch.backends.cudnn
    torch.backends.cuda.enable_flash_sdp(False)
    torch.autograd.forward_ad.enter_dual_level()
    torch._C._functorch._vmap_increment_nesting(2, "error")


@pytest.mark.parametrize("before", ["none", "tf32"])
def test_the_precision_of_products_by_the_newer_interface(before):
    """Torch refuses to tell of TF32 by the older interface then."""
    torch.backends.cuda.matmul.fp32_precision = before
    try:
        with restored() as inside:
            torch.backends.cuda.matmul.fp32_precision = "ieee"
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
            assert ["the precision of float32 products"] == [setting.name for setting in inside.changed()]
            inside.restore(inside.changed())
        assert before == torch.backends.cuda.matmul.fp32_precision
        assert () == inside.changed()
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_what_is_changed_is_named_and_restored():
    state = TorchState.now()
    with restored() as inside:
        change_everything()
        changed = inside.changed()
        inside.restore([setting for setting in changed if setting.setters])
    assert {
        "the default dtype",
        "the default device",
        "the grad mode",
        "autocast",
        "the deterministic mode",
        "the precision of float32 products",
        "torch.backends.cudnn.benchmark",
        "the flash attention kernels",
        "forward-mode differentiation",
        "torch.func's transforms",
    } <= {setting.name for setting in changed}
    assert () == state.changed()
    torch.testing.assert_close(torch.func.vmap(torch.sin)(torch.ones(2)), torch.ones(2).sin())
