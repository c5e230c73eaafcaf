"""Strided views of storage: chains of slices and diagonals, against torch's own views."""

import itertools

import pytest
import torch

import spmd
from spmd import P
from spmd.tracing.as_strided import places, read_through, views, write_through

MESH = spmd.make_mesh({"x": 4}, runtime="virtual")

HOLDERS = {
    "vector": lambda x: x.flatten(),
    "rows": lambda x: x.view(-1, 4),
    "columns": lambda x: x.view(-1, 4).t(),
    "part": lambda x: x.view(-1, 6)[1:, 1:5],
    "step": lambda x: x.view(-1, 6)[:, ::2],
    "cube": lambda x: x.view(4, 3, -1),
    "turned": lambda x: x.view(4, 3, -1).permute(2, 0, 1),
    "thin": lambda x: x.view(-1, 1, 4),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_views_read_and_write_what_torch_does(name):
    x = HOLDERS[name](torch.arange(48))
    first, steps = x.storage_offset(), sorted({*x.stride(), 2 * x.stride(0), sum(x.stride()), 1})
    sizes = [*itertools.product((1, 3), repeat=1), *itertools.product((1, 2, 3), repeat=2), *[(1, 2, 2), (2, 1, 3)]]
    found = 0
    for size in sizes:
        for stride in itertools.product(steps, repeat=len(size)):
            for offset in (first, first + x.stride(-1), first + x.stride(0)):
                reach = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
                chain = views(x, size, stride, offset)
                if reach >= 48 or chain is None:
                    continue
                expected = x.as_strided(size, stride, offset)
                assert expected.tolist() == read_through(chain, x).tolist(), (size, stride, offset)
                source, held = -torch.arange(expected.numel()).view(size), places(x, size, stride, offset)
                written = x.flatten().index_put((held,), source.flatten()).view(x.shape)
                assert written.tolist() == write_through(chain, x, source).tolist(), (size, stride, offset)
                found += 1
    assert found > 30


def heat(x):
    y = x.clone()
    y[1:-1] = x[1:-1] + 0.1 * (x[2:] - 2 * x[1:-1] + x[:-2])
    return y


def filled(x):
    y = x * 2
    y.fill_diagonal_(3.0)
    return y


FUNCTIONS = {
    "a written slice": heat,
    "a written column": lambda x: torch.func.functionalize(lambda y: y[:, 1].fill_(2.0) + y.sum(1))(x * 1),
    "a diagonal": filled,
    "a strided diagonal": lambda x: x.as_strided((4,), (x.shape[1] + 1,)) * 2,
    "all in order": lambda x: x.as_strided((x.numel(),), (1,)).sin(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (8, 8)])
def test_gradients_have_no_constants_and_are_those_of_one_device(name, shape):
    function = FUNCTIONS[name]
    gradient = torch.func.grad(lambda x: (function(x) ** 2).sum())
    x = torch.linspace(-1.0, 2.0, shape[0] * shape[1], dtype=torch.float64).view(shape)
    for spec in (P("x"), P(None, "x")):
        jitted = spmd.jit(gradient, spec, spec, mesh=MESH)
        assert () == jitted.trace(x).graph.constants
        torch.testing.assert_close(jitted(x).full_tensor(), gradient(x))


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (8, 8)])
def test_a_diagonal_is_filled_without_communication(spec, shape):
    jitted = spmd.jit(filled, spec, spec, mesh=MESH, comms="error")
    x = torch.ones(shape)
    torch.testing.assert_close(jitted(x).full_tensor(), filled(x))


def test_the_gradient_of_a_written_slice_sends_rows():
    gradient = torch.func.grad(lambda x: (heat(x) ** 2).sum())
    plan = spmd.jit(gradient, P("x"), P("x"), mesh=MESH).plan(torch.empty(32768, 1024, device="meta"))
    assert 16 * 1024 * 4 >= sum(comm.bytes for comm in plan.comms)
