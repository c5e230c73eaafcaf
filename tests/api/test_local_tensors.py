"""From local tensors to DTensors and back: gradients, checks, collectives in flight, and what torch takes apart."""

from __future__ import annotations

import io
import itertools
import pickle
from typing import Any

import construction_cases as cases
import pytest
import torch
from conftest import OnRanks
from sampling import product
from torch.utils._python_dispatch import transform_subclass
from workers import Workers, call_on_mesh

import spmd
from spmd import DTensor, P, Partial, Replicate, Shard
from spmd.api.values.dtensor import local_parts
from spmd.errors import DivergenceError, ShardingError

LINE = spmd.make_mesh({"x": 4}, runtime="virtual")
GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
AXES = {"x": 2, "y": 2}
SPECS = [
    P(), P("x"), P(None, ("y", "x")), P("x", partial={"y": "sum"}), P(partial={"x": "sum", "y": "sum"}), P("y", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "rows"), product(SPECS, [1, 5]))
def test_local_tensors_and_back(on_ranks: OnRanks, spec: P, rows: int) -> None:
    on_ranks(cases.there_and_back, AXES, spec, rows)


@pytest.mark.parametrize(("spec", "axis"), [(P("x"), "y"), (P(), "y"), (P(None, "y"), "x"), (P("y"), None)])
def test_gradients_of_shards_that_are_parts_of_a_sum(workers: Workers, spec: P, axis: str | None) -> None:
    workers.run(cases.partial_gradients, AXES, spec, axis, ranks=4)


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_gradients_of_the_whole_that_are_parts_of_a_sum(on_ranks: OnRanks, spec: P) -> None:
    on_ranks(cases.gradients_of_whole, AXES, spec)


@pytest.mark.parametrize("spec", [P("x"), P(None, ("y", "x")), P("x", partial={"y": "sum"})], ids=repr)
def test_gradients_of_what_is_distributed(on_ranks: OnRanks, spec: P) -> None:
    on_ranks(cases.gradients_of_what_is_distributed, AXES, spec)


def test_a_gradient_on_one_process_only_is_an_error_on_all(workers: Workers) -> None:
    for said in workers.run(call_on_mesh, cases.gradients_on_one_process, {"x": 2}, "distributed", ranks=2):
        assert "distribute on Mesh(x=2) with the gradient of leaf" in said


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_second_derivatives_through_local_parts(spec: P) -> None:
    """The parts of a tensor, cubed and joined again; on virtual ranks, whose parts are all here."""
    whole = torch.randn(3, 4, dtype=torch.float64)
    x = spmd.distribute(whole, spec, GRID).requires_grad_()
    found = x.spec.complete

    def joined(x: Any) -> Any:
        parts = local_parts(x.redistribute(found.pspec), found)
        return DTensor.from_local([part**3 for part in parts], GRID, found.pspec, shape=(3, 4))

    (first,) = torch.autograd.grad(joined(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    torch.testing.assert_close(first.detach().full_tensor(), 3 * whole**2)
    torch.testing.assert_close(second.full_tensor(), 36 * whole**3)


def test_the_gradient_of_a_leaf_is_never_pending() -> None:
    x = spmd.distribute(torch.ones(4), P(), LINE).requires_grad_()
    gradient = spmd.DTensorSpec.make(LINE, P(partial={"x": "sum"}), x.spec.meta)
    with spmd.comms_of() as sent:
        local_parts(x, gradient)[0].sum().backward()
    assert P() == x.grad.spec.pspec and {"all_reduce": 1} == sent.count()


def test_a_pending_gradient_is_reduced_where_it_is_needed() -> None:
    x = spmd.distribute(torch.ones(4), P("x"), LINE).requires_grad_()
    y = x.redistribute(P())
    gradient = spmd.DTensorSpec.make(LINE, P(partial={"x": "sum"}), x.spec.meta)
    with spmd.comms_of() as sent:
        torch.stack(local_parts(y, gradient)).sum().backward()
    assert {"reduce_scatter": 1} == sent.count()
    assert torch.equal(torch.full((4,), 4.0), x.grad.full_tensor())


REFUSED = {
    "another dim": ((P("x"), P(None, "x")), "must shard the dims of f32.4,4. P.'x'. as it is"),
    "a dim less": ((P("x"), P()), "must shard the dims"),
    "no sum": ((P(), P(partial={"x": "max"})), "must be partial in sums"),
    "no axis": ((P(), P("w")), "Unknown mesh axis 'w'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_specs_of_gradients_that_do_not_fit(name: str) -> None:
    (spec, given), text = REFUSED[name]
    x = spmd.distribute(torch.ones(4, 4), spec, LINE).requires_grad_()
    with pytest.raises(ShardingError, match=text):
        DTensor.from_local(list(x.shards), LINE, spec, grad_placements=given)
    if not spec.dims:
        with pytest.raises(ShardingError, match=text):
            x.full_tensor(grad_placements=given)


def test_axes_of_one_rank_make_no_difference_to_gradients() -> None:
    mesh = spmd.make_mesh({"x": 1}, runtime="virtual")
    x = spmd.ones(4, spec=P("x"), mesh=mesh, requires_grad=True)
    (x * 2).to_local(grad_placements=[Replicate()]).sum().backward()
    assert torch.equal(torch.full((4,), 2.0), x.grad.full_tensor())


def test_replicas_are_checked_where_asked() -> None:
    shards = [torch.ones(2) + (rank == 3) for rank in range(4)]
    DTensor.from_local(shards, GRID, P())
    DTensor.from_local(shards, GRID, P(("x", "y")), run_check=True)
    with pytest.raises(DivergenceError, match=r"the tensor differs between ranks.* on ranks 0, 1, 2; .* on rank 3"):
        DTensor.from_local(shards, GRID, P(), run_check=True)
    with pytest.raises(DivergenceError, match="the tensor differs between ranks, which differ only along y"):
        DTensor.from_local(shards, GRID, P("x"), run_check=True)


def test_ranks_compare_what_they_give(workers: Workers) -> None:
    texts = workers.run(cases.refused_local_tensors, ranks=2)
    assert texts[0] == texts[1]
    found = texts[0]
    assert "Shard of rank 1 must be f32[3] for a global tensor" in found["dtype"] and "(got f64[3])" in found["dtype"]
    assert "Shard of rank 1 must be f32[2,3]" in found["shape"]
    assert (
        "Ranks make different calls" in found["requires_grad"] and "with a gradient on rank 0" in found["requires_grad"]
    )
    assert "the tensor differs between ranks" in found["replicas"]
    assert found["unchecked"] == ""


@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 2, "y": 2}], ids=repr)
def test_collectives_in_flight(workers: Workers, axes: dict[str, int]) -> None:
    for waited in workers.run(cases.in_flight, axes, ranks=2 if len(axes) == 1 else 4):
        assert waited


def test_a_move_in_flight_on_virtual_ranks_is_there_at_once() -> None:
    x = spmd.arange(5, spec=P("x"), mesh=LINE)
    assert "in flight" not in repr(x.redistribute(P(), async_op=True))


def test_an_error_of_a_collective_in_flight_names_the_call_and_its_line(workers: Workers) -> None:
    for text in workers.run(cases.failing_in_flight, ranks=2):
        assert "all_gather over x (redistribute(P()) at " in text and "construction_cases.py" in text
        assert "failed" in text


def test_the_mesh_and_the_spec_may_be_left_out() -> None:
    with spmd.use_mesh(LINE):
        assert P() == DTensor.from_local([torch.ones(2)] * 4).spec.pspec
        assert (8,) == DTensor.from_local([torch.ones(2)] * 4, spec=P("x")).shape


def test_torch_takes_it_apart_and_together() -> None:
    x = spmd.distribute(torch.arange(10.0).view(5, 2), P("x"), LINE).requires_grad_()
    names, context = x.__tensor_flatten__()
    assert list(x.shards) == [getattr(x, name) for name in names]
    hash(context)
    inner = {name: getattr(x, name) for name in names}
    again = DTensor.__tensor_unflatten__(inner, context, x.size(), x.stride())
    assert again.spec == x.spec and again.requires_grad and again.shards == x.shards
    moved = transform_subclass(x, lambda _, shard: shard.double() + 1)
    assert torch.float64 == moved.dtype == moved.spec.meta.dtype
    assert torch.equal(torch.arange(10.0).view(5, 2).double() + 1, moved.detach().full_tensor())
    assert not hasattr(x, "_shard_4") and not hasattr(x, "_shard_x")


X = spmd.distribute(torch.arange(10.0).view(5, 2), P(("y", "x")), GRID)
PICKLED = [P("x", None, partial={"y": "sum"}), X.spec, X.mesh, X.spec.meta, Shard(1), Partial("max"), Replicate()]


@pytest.mark.parametrize("value", PICKLED, ids=lambda value: type(value).__name__)
def test_specs_can_be_pickled(value: Any) -> None:
    again = pickle.loads(pickle.dumps(value))
    assert value == again and hash(value) == hash(again) and repr(value) == repr(again)
    buffer = io.BytesIO()
    torch.save({"spec": value}, buffer)
    buffer.seek(0)
    assert value == torch.load(buffer, weights_only=True)["spec"]


def test_modules_of_dtensors_change_dtype_and_memory() -> None:
    layer = torch.nn.Linear(4, 6)
    values = {name: value.detach().clone() for name, value in layer.named_parameters()}
    spmd.distribute_module(layer, GRID, lambda name, module, mesh: {"weight": P("x", "y")})
    weight = layer.weight
    layer(spmd.ones(2, 4, mesh=GRID)).sum().backward()
    before = weight.grad.full_tensor()
    layer.double()
    assert weight is layer.weight and P("x", "y") == weight.spec.pspec
    assert torch.equal(values["weight"].double(), weight.detach().full_tensor())
    assert torch.equal(before.double(), weight.grad.full_tensor())
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert weight is layer.weight and weight.requires_grad and P("x", "y") == weight.spec.pspec


def test_data_of_another_tensor() -> None:
    x, y = (spmd.full((4,), number, spec=P("x"), mesh=LINE) for number in (1.0, 2.0))
    alias = x.detach()
    x.data = y * 2
    alias.add_(5)
    assert [4.0] * 4 == x.tolist() and [6.0] * 4 == alias.tolist()
    with pytest.raises(ShardingError, match="can be that of one of its shape on its mesh"):
        x.data = spmd.ones(5, mesh=LINE)
    x.data = alias
    x.add_(1)
    assert [7.0] * 4 == alias.tolist()  # they share memory, as on one device


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(SPECS, 2)), ids=repr)
def test_moves_and_their_gradients_in_any_spec(source: P, target: P) -> None:
    whole = torch.randn(5, 6, dtype=torch.float64)
    x = spmd.distribute(whole, source, GRID).requires_grad_()
    y = x.redistribute(target, async_op=True)
    assert torch.allclose(whole, y.detach().full_tensor())
    y.backward(spmd.distribute(2 * whole, target, GRID))
    assert torch.allclose(2 * whole, x.grad.full_tensor()) and x.grad.spec == x.spec.complete
