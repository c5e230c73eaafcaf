"""Casts and types of values in shard_map bodies, where programs are not what they seem."""

import pytest
import torch

from spmd import P, collectives, distribute, jit, make_mesh, shard_map

MESH = make_mesh({"x": 2}, runtime="virtual")
GRID = make_mesh({"x": 2, "y": 2}, runtime="virtual")


def gradient(function, *specs):
    """The gradient of the sum of a function's result by its first argument, inside of jit."""
    return jit(torch.func.grad(lambda *args: function(*args).sum()), specs, None, mesh=MESH)


def test_a_view_of_a_written_tensor_is_read_under_a_transform_from_outside():
    gather = shard_map(lambda a: collectives.all_gather(a.clone().add_(a), "x"), MESH, P(None, "x"), P("x"))
    x = distribute(torch.randn(3, 4), P(None, "x"), MESH)
    found = torch.func.grad(lambda x: gather(x).sum())(x)
    torch.testing.assert_close(found.full_tensor(), torch.full((3, 4), 4.0))


def test_a_value_of_the_outer_body_keeps_its_types_in_the_inner_one():
    def outer(v):
        return shard_map(lambda b: collectives.psum(v, "y"), GRID, P(), P(), axis_names={"x"})(v)

    x = torch.randn(4, 2)
    found = shard_map(outer, GRID, P(None, "y"), P(), axis_names={"y"})(x)
    torch.testing.assert_close(found.full_tensor(), x.sum(1, keepdim=True))


def test_one_unreduced_value_twice_in_a_list():
    def double(a):
        u = collectives.pcast(a, "x", to="unreduced")
        return collectives.psum(torch.stack([u, u]), "x")

    x = torch.randn(4)
    found = shard_map(double, MESH, P("x"), P())(x).full_tensor()
    torch.testing.assert_close(found, x.view(2, 2).sum(0).expand(2, 2))


def test_an_invariant_factor_of_an_unreduced_value_has_the_sum_of_gradients():
    def product(w, a):
        return collectives.psum(collectives.pcast(a, "x", to="unreduced") * w, "x")

    w, x = torch.randn(2), torch.randn(4)
    found = gradient(shard_map(product, MESH, (P(), P("x")), P()), P(), P("x"))(w, x)
    torch.testing.assert_close(found.full_tensor(), x.view(2, 2).sum(0))


OF_REDUCED = {
    "where": lambda w: torch.where(w > 0, w, 0.3 * w),
    "clamp": lambda w: w.clamp(min=0.1),
    "index_select": lambda w: w.index_select(0, torch.tensor([0, 0])),
    "index": lambda w: w[torch.tensor([1, 1])],
    "sort": lambda w: w.sort().values,
}


@pytest.mark.parametrize("name", OF_REDUCED)
def test_gradients_that_are_written_to_zeros_may_be_summands(name):
    def product(w, a):
        return collectives.psum(a * OF_REDUCED[name](collectives.pcast(w, "x", to="reduced")), "x")

    w, x = torch.tensor([0.4, -0.7]), torch.randn(4)
    found = gradient(shard_map(product, MESH, (P(), P("x")), P()), P(), P("x"))(w, x)
    expected = torch.func.grad(lambda w: (x.view(2, 2) * OF_REDUCED[name](w)).sum())(w)
    torch.testing.assert_close(found.full_tensor(), expected)


def test_pmax_along_another_axis_of_a_reduced_value():
    def largest(w, a):
        held = collectives.pcast(w, "y", to="reduced")
        return collectives.psum(a * collectives.pmax(held, "x"), "y")

    mapped = shard_map(largest, GRID, (P("x"), P("y")), P())
    w, x = torch.tensor([0.4, -0.7]), torch.randn(2)
    found = jit(torch.func.grad(lambda w, x: mapped(w, x).sum()), (P("x"), P("y")), None, mesh=GRID)(w, x)
    torch.testing.assert_close(found.full_tensor(), torch.stack([x.sum(), torch.zeros(())]))


def test_a_vmap_of_a_closed_over_tensor_enters_it_once():
    def scaled(w):
        return shard_map(lambda: torch.vmap(lambda row: collectives.pcast(row, "x"), 0, 1)(w), MESH, (), P("x"))()

    w = torch.randn(2, 3)
    torch.testing.assert_close(jit(scaled, P(), None, mesh=MESH)(w).full_tensor(), torch.cat([w.T, w.T]))
    found = gradient(scaled, P())(w).full_tensor()
    torch.testing.assert_close(found, torch.full((2, 3), 2.0))


def test_a_closed_over_tensor_is_returned_by_one_body_and_read_by_another():
    constant = torch.tensor(0.8)

    def program(x):
        kept = shard_map(lambda b: (constant, b), MESH, P("x"), (P(), P("x")))(x)
        return kept, shard_map(lambda b: collectives.all_gather(constant, "x") * b, MESH, P("x"), P("x"))(x)

    x = torch.randn(4)
    (first, second), third = jit(program, P(), None, mesh=MESH)(x)
    torch.testing.assert_close(first.full_tensor(), constant)
    torch.testing.assert_close(second.full_tensor(), x)
    torch.testing.assert_close(third.full_tensor(), 0.8 * x)


def test_an_invariant_cotangent_of_an_unreduced_value_is_cast_to_reduced() -> None:
    mesh = make_mesh({"y": 3}, runtime="virtual")

    def gradient(x: torch.Tensor) -> torch.Tensor:
        def body(summand: torch.Tensor) -> torch.Tensor:
            (pulled,) = torch.func.vjp(lambda a: a / (1 + x * x), summand)[1](x * x)
            return collectives.psum(collectives.pcast(pulled, "y", to="varying"), "y")

        return shard_map(body, mesh, P(partial={"y": "sum"}), P())(x)

    x = torch.linspace(-1.0, 1.0, 4)
    found = jit(torch.func.grad(lambda x: (gradient(x) * x).sum()), P(), P(), mesh=mesh)(x)
    torch.testing.assert_close(found.full_tensor(), 3 * (3 * x**2 + x**4) / (1 + x**2) ** 2)
