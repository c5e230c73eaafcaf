"""In-place writes through views in which several elements share one place of memory."""

import pytest
import torch

import spmd
from spmd import P, TraceError

MESH = spmd.make_mesh({"x": 2}, runtime="virtual")
X = torch.randn(4, 3, dtype=torch.float64)


def zeroed(v):
    v = v * 1
    v.expand(2, *v.shape).zero_()
    return v


def filled(v):
    v = v * 1
    v[:1].expand(4, 3).fill_(0.3)
    v[:, :1].unsqueeze(1).expand(4, 5, 1).fill_(0.7)
    return v


def partly(v):
    v = v * 1
    v[0].expand(2, 3)[:, 1:].fill_(2.0)
    return v


def not_overlapping(v):
    v = v * 1
    v.t()[1:].mul_(2)
    v.unfold(0, 2, 2).add_(1)
    v.expand(1, 4, 3).mul_(3)
    v.diagonal().zero_()
    return v


def of_repeated(v):
    v = v * 1
    v.expand(2, 4, 3)[0].mul_(2)
    v[1:].unsqueeze(0).expand(2, 3, 3)[1, :, 1].add_(v[0])
    v.unfold(0, 3, 1)[0, 1].add_(0.5)
    return v


def by_strides(v):
    v = v * 1
    v.as_strided((3, 2), (2, 3), 1).mul_(2)
    v.t()[1:].as_strided((2, 2), (1, 3), 4).add_(1)
    v[1:].as_strided((2, 2), (3, 1), 4)[1].sin_()
    return v


def through_expand_that_repeats_nothing(v):
    """What is written is what is there, to the bit, whatever was there."""
    v = torch.where(v > 0.5, torch.inf, v)
    v[:1].expand(1, 3).fill_(0.4)
    v[1:3].expand(2, 3).copy_(v[:2].neg())
    v[3].expand(1, 1, 3).mul_(0.1).add_(1)
    return v


def filled_by_masks(v):
    v = v * 1
    v.expand(2, 4, 3).masked_fill_(torch.stack([v > 0.5, v < -0.5]), 7.0)
    v[:, :1].expand(4, 5)[v[:, :1] * torch.arange(5) > 1] = 2.0
    v[0].expand(3, 3).tril_()
    v[:, 2:].expand(4, 2).index_fill_(0, torch.tensor([1]), 5.0)
    return v


def between_windows(v):
    v = v * 1
    v.unfold(1, 2, 2).add_(1)
    v.unfold(0, 1, 2).mul_(3)
    torch._foreach_mul_([v.unfold(0, 3, 3)], 2.0)
    torch.add(v[:2, :1], 1, out=v.unfold(1, 1, 2)[:2, :1, 0])
    return v


def of_unsafe_views(v):
    v = v * 1
    v.unsafe_split(2)[1].mul_(2)
    v.unsafe_chunk(3, 1)[0].add_(1)
    v.unsafe_split_with_sizes([1, 3])[0].zero_()
    return v


def into_empty(v):
    out = torch.empty(0, dtype=v.dtype)
    torch.mm(v, v.T, out=out)
    return out * out.shape[0]


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        zeroed, filled, partly, not_overlapping, of_repeated, by_strides, filled_by_masks, between_windows,
        of_unsafe_views, into_empty, through_expand_that_repeats_nothing,
    ],
)  # fmt: skip
def test_values(function, spec):
    assert torch.equal(function(X), spmd.jit(function, spec, P(), mesh=MESH)(X).full_tensor())


@pytest.mark.parametrize("function", [not_overlapping, of_repeated, by_strides])
def test_gradients(function):
    gradient = torch.func.grad(lambda x: (function(x) * x).sin().sum())
    torch.testing.assert_close(spmd.jit(gradient, P("x"), P(), mesh=MESH)(X).full_tensor(), gradient(X))


REFUSED = {
    "mul_": lambda v: v.expand(2, 4, 3).mul_(2),
    "add_": lambda v: v.expand(2, 4, 3).add_(torch.ones(2, 4, 3)),
    "copy_": lambda v: v.expand(2, 4, 3).copy_(torch.ones(2, 4, 3)),
    "fill_ with a tensor": lambda v: v.expand(2, 4, 3).fill_(torch.ones(())),
    "unfold": lambda v: v.unfold(0, 2, 1).mul_(2),
    "as_strided": lambda v: v.as_strided((4, 3), (1, 1)).mul_(2),
}


@pytest.mark.parametrize("name", ["mul_", "add_", "copy_", "fill_ with a tensor"])
def test_torch_refuses_what_is_expanded(name):
    with pytest.raises(RuntimeError, match="more than one element"):
        REFUSED[name](X * 1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_one_meaning_is_refused_with_the_line(name):
    def function(x):
        v = x * 1
        REFUSED[name](v)
        return v

    with pytest.raises(TraceError, match=r"test_overlapping.py:\d+ .*writes in place to a tensor of shape"):
        spmd.jit(function, P("x"), P(), mesh=MESH)(X)


def test_out_of_another_shape_is_refused():
    """Torch warns that it will refuse it."""

    def function(v):
        out = torch.empty(3, 3, dtype=v.dtype)
        return torch.mm(v, v.T, out=out)

    with pytest.raises(TraceError, match=r"test_overlapping.py.*result of shape \[4, 4\] for out= of shape \[3, 3\]"):
        spmd.jit(function, P(), P(), mesh=MESH)(X)


def _out_of_product(v):
    out = torch.empty(0, dtype=v.dtype)
    torch.mm(v, v.T, out=out)
    out[1:].mul_(2)
    return out


def _resized(v):
    new = v.new().resize_as_(v)
    new.copy_(v)
    new.select(1, 0).add_(1)
    return new


@pytest.mark.parametrize("function", [_out_of_product, _resized, torch.nn.CrossMapLRN2d(2)])
def test_writes_to_views_of_empty_tensors_that_are_resized(function):
    x = torch.randn(4, 3, 2, 2) if isinstance(function, torch.nn.Module) else X
    assert torch.allclose(function(x), spmd.jit(function, P("x"), P(), mesh=MESH)(x).full_tensor())
