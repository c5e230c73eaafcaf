"""What is written to keeps its strides: the numbers of a draw that goes by them are those of one device."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from sampling import product

import spmd
from spmd import P
from spmd.core.pytree import tree_map

A, B, X = torch.randn(4, 5), torch.randn(5, 3), torch.randn(4, 3)
ROWS = torch.tensor([1, 0, 3, 2])
MESH = spmd.make_mesh({"data": 2}, runtime="virtual")


def check_draws(function, x=X):
    """The results, in which random numbers show the order of memory, are those of one device."""
    torch.manual_seed(0)
    expected = function(x.contiguous())
    torch.manual_seed(0)
    found = spmd.jit(function, P("data"), P(), mesh=MESH)(x)
    torch.testing.assert_close(tree_map(spmd.DTensor.full_tensor, found), expected)


WRITES = {
    "mm out": lambda y: torch.mm(A, B, out=y),
    "mul out of transposes": lambda y: torch.mul(X.t().contiguous().t(), 2, out=y),
    "mm out of transposes": lambda y: torch.mm(A.t().contiguous().t(), B, out=y),
    "sin out": lambda y: torch.sin(X, out=y),
    "cat out": lambda y: torch.cat([X[:2], X[2:]], out=y),
    "sort out": lambda y: torch.sort(X, 0, out=(y, torch.empty(0, dtype=torch.int64))),
    "sum out": lambda y: torch.sum(X[None], 0, out=y),
    "matmul out": lambda y: torch.matmul(A, B, out=y),
    "eye": lambda y: torch.eye(4, 3, out=y),
    "addmm_": lambda y: y.addmm_(A, B),
    "addmm_ of rows": lambda y: y[1:].addmm_(A[1:], B),
    "baddbmm_": lambda y: y.unsqueeze(0).baddbmm_(A[None], B[None]),
    "cumsum_": lambda y: y.add_(X).cumsum_(0),
    "index_add_": lambda y: y.index_add_(0, ROWS, X),
    "scatter_": lambda y: y.scatter_(0, ROWS[:, None].expand(4, 3), X),
    "masked_fill_": lambda y: y.masked_fill_(X > 0, 1.0),
    "masked_scatter_": lambda y: y.masked_scatter_(X > 0, X),
    "tril_": lambda y: y.add_(X).tril_(),
    "renorm_": lambda y: y.add_(X).renorm_(2, 0, 1.0),
    "mul_": lambda y: y.add_(X).mul_(X),
    "copy_": lambda y: y.copy_(X),
    "positions": lambda y: y.__setitem__(ROWS, X),
    "foreach": lambda y: torch._foreach_add_([y], [X]),
    "bernoulli_": lambda y: y.bernoulli_(),
}
TARGETS = {
    "a contiguous tensor": lambda: (torch.zeros(4, 3),) * 2,
    "a transpose": lambda: (torch.zeros(3, 4).t(),) * 2,
    "a tensor through its transpose": lambda: (lambda z: (z, z.t()))(torch.zeros(3, 4)),
    "a transpose through its transpose": lambda: (lambda z: (z, z.t()))(torch.zeros(4, 3).t()),
    "a slice": lambda: (lambda z: (z, z[:, 1:4]))(torch.zeros(4, 5)),
}


@pytest.mark.parametrize(("name", "target"), product(WRITES, TARGETS))
def test_draws_after_a_write(name, target):
    def function(x):
        held, written = TARGETS[target]()
        WRITES[name](written)
        return held + torch.randn_like(held), written + torch.randn_like(written) + x

    check_draws(function)


NORMALIZATIONS = {
    "layer_norm": lambda y: torch.nn.functional.layer_norm(y, y.shape[-2:]),
    "batch_norm": lambda y: torch.nn.functional.batch_norm(y, None, None, training=True),
}


@pytest.mark.parametrize("order", [(0, 2, 1), (0, 2, 3, 1), (0, 3, 2, 1), (1, 0, 2, 3)], ids=str)
@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_noise_on_gradients(name, order):
    x = torch.randn(3, 3, 3, 3)[..., 0] if len(order) == 3 else torch.randn(3, 3, 3, 3)

    def function(x):
        slope = torch.func.vjp(NORMALIZATIONS[name], x.permute(order))[1](x.sin().permute(order))[0]
        return slope + torch.randn_like(slope)

    check_draws(function, x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (0, 2, 3, 1), (0, 3, 2, 1), (1, 0, 2, 3)], ids=str)
def test_draws_after_batch_norm(order, training):
    x = torch.randn(3, 3, 3, 3)[..., 0] if len(order) == 3 else torch.randn(3, 3, 3, 3)

    def function(x):
        found = torch.nn.functional.batch_norm(x.permute(order), A[0, :3].exp(), A[1, :3].exp(), training=training)
        return torch.nn.functional.dropout(found, 0.5)

    check_draws(function, x)


@pytest.mark.parametrize(
    "normal",
    [
        lambda y: torch.normal(y, 1.0),
        lambda y: torch.normal(0.5, y.exp()),
        lambda y: torch.normal(y, y.exp()),
        lambda y: torch.normal(y, y.exp().contiguous()),
    ],
    ids=["of means", "of deviations", "of both", "of both, one contiguous"],
)
def test_draws_after_normal(normal):
    def function(x):
        return torch.rand_like(normal(x.t()))

    check_draws(function)


def orders(*shape):
    """Tensors of a shape, in different memory orders."""
    for order in itertools.permutations(range(len(shape))):
        yield torch.rand([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


def check_draws_after(function, first, second):
    """As `check_draws`, of noise on all results of a function of two tensors."""
    pairs = [*itertools.product(first, second)]

    def noisy(z):
        results = [function(x, y) for x, y in pairs]
        return [result + torch.randn_like(result) * z.sum() for result in results]

    check_draws(noisy)


WEIGHT = torch.rand(3, 3, 1).movedim(1, -1)  # a dim of length 1 has the stride 1
ROUNDED = {"rounding_mode": "floor"}
RESULTS = {
    "pow": lambda x, y: 2.0**y,
    "logsigmoid": lambda x, y: F.logsigmoid(y),
    "div": lambda x, y: torch.div(x, y, **ROUNDED),
    "div by a number": lambda x, y: torch.div(y, torch.tensor(0.5), **ROUNDED),
    "div by a row": lambda x, y: torch.div(y, y[:1] + 2, **ROUNDED),
    "div by a column": lambda x, y: torch.div(y, y[:, :1] + 2, **ROUNDED),
    "floor_divide": torch.floor_divide,
    "copysign": torch.copysign,
    "xlogy": torch.xlogy,
    "xlog1py": torch.special.xlog1py,
    "bce": lambda x, y: F.binary_cross_entropy(x, y, reduction="none"),
    "channel_shuffle": lambda x, y: torch.channel_shuffle(y[None].movedim(2, 1), 2),
    **{
        f"gradient of {function.__name__}": lambda x, y, f=function: torch.func.vjp(f, x)[1](y)[0]
        for function in (F.hardswish, F.hardsigmoid, F.hardtanh, F.elu, F.softplus, F.silu, F.gelu, torch.logit)
    },
    **{
        f"gradient of {loss.__name__}": lambda x, y, f=loss: torch.func.grad(f)(x, y)
        for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy)
    },
}


@pytest.mark.parametrize("name", RESULTS)
def test_draws_after_results_of_operands_in_different_orders(name):
    check_draws_after(RESULTS[name], orders(2, 4, 3), orders(2, 4, 3))


def count(image):
    """The paddings of an image or a volume."""
    return 2 * (image.ndim - 2)


INDEXED = {
    "rows": lambda x, i: x[i],
    "an inner dim": lambda x, i: x[:, i],
    "two dims": lambda x, i: x[i, i.flip(0)],
    "dims apart": lambda x, i: x[i, :, i],
    "a new dim": lambda x, i: x[None, i],
    "indices that broadcast": lambda x, i: x[i[:1], i],
    "one_hot": lambda x, i: F.one_hot(i, 3).float(),
    "isin": lambda x, i: torch.isin(i, torch.tensor([1])).float(),
    "nll_loss": lambda x, i: F.nll_loss(x[:, :, None].expand(3, 3, 2, 3), i[None].expand(3, 2, 3), reduction="none"),
    "resize_as_": lambda x, i: x.clone().resize_as_(x.t() if x.ndim == 2 else x.movedim(0, 1)),
    "convolution of batches": lambda x, i: torch.func.vmap(
        lambda x: F.group_norm(F.conv2d(x, torch.ones(2, 1, 2, 2)), 1), in_dims=4
    )(x[None, None].contiguous()),
    "gradient of a cast": lambda x, i: torch.func.grad(lambda x: x.bfloat16().square().sum())(x).float(),
    **{
        f"gradient of {name}": lambda x, i, f=function: torch.func.vjp(f, x.movedim(0, 1))[1](f(x.movedim(0, 1)).cos())[
            0
        ]
        for name, function in {
            "log_softmax": lambda x: F.log_softmax(x.contiguous(), 1).movedim(1, 2),
            "glu": lambda x: F.glu(torch.cat([x, x]), 0),
            "prod": torch.prod,
            "prod of a dim": lambda x: x.prod(1),
            "prod of a kept dim": lambda x: torch.prod(x, dim=-1, keepdim=True),
        }.items()
    },
    "a number compared with a dim of length 1": lambda x, i: torch.where(x[:, None].movedim(0, 1) > 0.5, x[None], 0.0),
    "a product of sums": lambda x, i: (-x.sum(1, keepdim=True).movedim(1, 2)).expand(3, 3, 3) * i.sum(0),
    "convolution with a closed-over weight": lambda x, i: F.conv_transpose1d(x, WEIGHT, None, groups=3),
    "expanded": lambda x, i: torch.tensor(2.0).expand(x.shape) * x,
    "gradient of relu": lambda x, i: torch.func.grad(lambda x: x.relu().sum())(x),
    "angle": lambda x, i: torch.complex(x, x + 1).angle(),
    **{
        f"{mode} padding of {name}": lambda x, i, mode=mode, image=image: F.pad(
            image(x), [1] * count(image(x)), mode=mode
        )
        for mode in ("replicate", "reflect")
        for name, image in (("images", lambda x: x[None]), ("volumes", lambda x: x[None, None]))
    },
    **{
        f"gradient of {mode} padding": lambda x, i, mode=mode: torch.func.grad(
            lambda x: F.pad(x[None], [1] * 4, mode=mode).sin().sum()
        )(x)
        for mode in ("replicate", "reflect")
    },
    "roll": lambda x, i: x[None].movedim(-1, 1).roll(1, 2),
    "roll of all": lambda x, i: x[None].movedim(-1, 1).roll(1),
    "logical_or": lambda x, i: torch.logical_or(x[:, :1], x[:1]).float(),
    "logaddexp": lambda x, i: torch.logaddexp(x[:, :1], x[:1]),
    "nearest neighbours": lambda x, i: F.interpolate(x, scale_factor=1.7),
    "nearest neighbours of images": lambda x, i: F.interpolate(x[None], scale_factor=1.7),
    "linear interpolation": lambda x, i: F.interpolate(x, scale_factor=1.7, mode="linear"),
    "max_pool3d": lambda x, i: F.max_pool3d(x.movedim(0, 2)[None], 1),
    "gradient of max_pool3d": lambda x, i: torch.func.vjp(lambda y: F.max_pool3d(y, 1), x[None])[1](
        x.movedim(0, 2)[None]
    )[0],
    "max_pool1d": lambda x, i: F.max_pool1d(x, 2, 1),
    "gradient of max_pool1d": lambda x, i: torch.func.grad(lambda x: F.max_pool1d(x, 2, 1).sin().sum())(x),
}


@pytest.mark.parametrize("name", INDEXED)
def test_draws_after_results_of_indices_in_different_orders(name):
    check_draws_after(INDEXED[name], orders(3, 3, 3), ((index * 3).long() for index in orders(2, 3)))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own forward-mode differentiation
@pytest.mark.parametrize("transform", ["none", "grad", "jvp", "jvp of grad", "vmap"])
def test_draws_after_gradients_of_attention(transform):
    """Attention is what torch computes on one device, whatever transform acts on other values."""
    q = torch.randn(2, 2, 3, 2)

    def noise(x):
        attend = lambda q: F.scaled_dot_product_attention(q, q[:, :, :1], q[:, :, :1]).sin().sum()  # noqa: E731
        gradient = torch.func.grad(attend)(q)
        return (gradient * torch.randn_like(gradient)).sum() * x.sum()

    function = {
        "none": noise,
        "grad": torch.func.grad(noise),
        "jvp": lambda x: torch.func.jvp(noise, (x,), (x,))[1],
        "jvp of grad": lambda x: torch.func.jvp(torch.func.grad(noise), (x,), (x.cos(),))[0],
        "vmap": torch.func.vmap(noise, randomness="same"),
    }[transform]
    check_draws(function)
