"""Derivatives of functions whose own kernels lack some, inside of a function under jit."""

import pytest
import torch
import torch.nn.functional as F
from sampling import product
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import spmd
from spmd import P

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")
X = torch.randn(2, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([2, 0, 1])

TRANSFORMS = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),))[1],
    "hessian": hessian,
    "grad of grad": lambda f: grad(lambda x: grad(f)(x).cos().sum()),
    "jvp of grad": lambda f: lambda x: jvp(grad(f), (x,), (x.cos(),))[1],
    "vmap of grad": lambda f: vmap(grad(lambda row: f(row[None]))),
}
LOSSES = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1).sin().sum(),
    "causal attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True).sin().sum(),
    "one_hot": lambda x: (F.one_hot(CLASSES, 4) * x).sin().sum(),
    "logit": lambda x: torch.logit(x.sigmoid(), 1e-6).sin().sum(),
}


@pytest.mark.parametrize(("loss", "transform"), product(LOSSES, TRANSFORMS))
def test_derivatives(loss, transform):
    function = TRANSFORMS[transform](LOSSES[loss])
    result = spmd.jit(function, P("data"), P(), mesh=MESH)(X)
    with sdpa_kernel(SDPBackend.MATH):  # plain torch has no derivatives of the others
        torch.testing.assert_close(result.full_tensor(), function(X))


def test_a_gradient_takes_the_fused_kernel():
    plan = spmd.jit(grad(LOSSES["attention"]), P("data"), P("data"), mesh=MESH).plan(X)
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in str(plan.graph)


PRODUCTS = {
    "product": lambda x: x.movedim(0, 2).prod(),
    "of a dim": lambda x: x.movedim(0, 2).prod(1).sin().sum(),
    "of a kept dim": lambda x: torch.prod(x.movedim(0, 2), dim=-1, keepdim=True).sin().sum(),
}


@pytest.mark.parametrize(("name", "transform"), product(PRODUCTS, [*TRANSFORMS, "jacrev", "vmap of pullback"]))
def test_derivatives_of_products(name, transform):
    more = {
        "jacrev": lambda f: jacrev(lambda x: torch.stack([f(x), f(x.cos())])),
        "vmap of pullback": lambda f: lambda x: vmap(lambda c: vjp(f, x)[1](c)[0])(x[0, 0, 0]),
    }
    function = {**TRANSFORMS, **more}[transform](PRODUCTS[name])
    torch.testing.assert_close(spmd.jit(function, P("data"), P(), mesh=MESH)(X).full_tensor(), function(X))


def test_a_tangent_that_is_a_slice_traced_twice():
    """Torch's cache of fake results forgot the storage of such a tangent, and its next view failed."""

    def function(x):
        return jvp(lambda y: y.reshape(2, 2).sin(), (x[0, 0, 0],), (x[1, 1, 1],))[1]

    for _ in range(2):
        torch.testing.assert_close(spmd.jit(function, P("data"), P(), mesh=MESH)(X).full_tensor(), function(X))
