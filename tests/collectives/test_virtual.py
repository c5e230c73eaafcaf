import math

import pytest
import torch

from spmd.collectives.primitives import ALL_REDUCE, KINDS
from spmd.collectives.traffic import record_traffic
from spmd.collectives.virtual import run
from spmd.core.mesh import make_mesh
from spmd.errors import DivergenceError, SpmdError

MESH = make_mesh({"x": 2, "y": 3}, runtime="virtual")
ops = torch.ops.spmd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_neutral_elements_are_neutral(op, dtype):
    x = torch.tensor([0, 1, 1]).to(dtype)
    x = torch.tensor([math.inf, -math.inf, 1.0]).to(dtype) if dtype.is_floating_point else x
    parts = run(ops.to_partial.default, MESH, [((x, op, ["x", "y"]), {})] * 6)
    whole = run(ops.all_reduce.default, MESH, [((part, op, ["x", "y"]), {}) for part in parts])
    for result in whole:
        assert dtype == result.dtype
        assert torch.equal(x, result)


def test_ranks_that_disagree_are_found():
    mesh = make_mesh({"x": 2}, runtime="virtual")

    def calls(*arguments):
        return [(rank_arguments, {}) for rank_arguments in arguments]

    one, two = torch.ones(1), torch.ones(2)
    with pytest.raises(DivergenceError, match=r"different shapes in one collective: \[\(1,\), \(2,\)\]"):
        run(ops.all_reduce.default, mesh, calls((one, "sum", ["x"]), (two, "sum", ["x"])))
    with pytest.raises(DivergenceError, match=r"ranks hold \[1, 2\] of dim 0, not the chunks of its length 3"):
        run(ops.all_gather.default, mesh, calls((one, 0, 3, ["x"]), (two, 0, 3, ["x"])))
    with pytest.raises(DivergenceError, match="runs over different axes on different ranks"):
        run(ops.all_reduce.default, MESH, calls(*[(one, "sum", ["x"])] * 5, (one, "sum", ["y"])))
    with pytest.raises(SpmdError, match=r"needs one call for each of the 2 ranks of Mesh\(x=2\) \(got 1\)"):
        run(ops.all_reduce.default, mesh, calls((one, "sum", ["x"])))
    with pytest.raises(SpmdError, match=r"aten\.add\.Tensor is not a primitive"):
        run(torch.ops.aten.add.Tensor, mesh, calls((one, one), (one, one)))


def test_keyword_arguments_are_arguments():
    mesh = make_mesh({"x": 2}, runtime="virtual")
    calls = [((torch.tensor(value),), {"axes": ["x"], "op": "max"}) for value in (3, 2)]
    assert [3, 3] == [result.item() for result in run(ops.all_reduce.default, mesh, calls)]


def test_reductions_run_in_rank_order():
    mesh = make_mesh({"x": 3}, runtime="virtual")
    values = [1e8, 1.0, -1e8]  # in float32 the order decides: (1e8 + 1) - 1e8 = 0
    results = run(ops.all_reduce.default, mesh, [((torch.tensor(value), "sum", ["x"]), {}) for value in values])
    assert [0.0] * 3 == [result.item() for result in results]


@pytest.mark.parametrize("kind", KINDS)
def test_traffic_of_even_shards_is_the_closed_form(kind):
    mesh = make_mesh({"x": 4, "y": 2}, runtime="virtual")
    shape, args = KINDS[kind].example(4, 32)
    x = torch.randn(shape)
    with record_traffic() as traffic:
        run(KINDS[kind].op, mesh, [((x, *args, ["x"]), {}) for _ in range(mesh.size)])
    (transfer,) = traffic.transfers
    assert (kind, ("x",)) == (transfer.kind, transfer.axes)
    assert {KINDS[kind].ring_bytes(4, x.nbytes)} == set(transfer.sent)


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_on_meta_is_like_that_of_the_first_rank(kind):
    mesh = make_mesh({"x": 4}, runtime="virtual")
    shape, args = KINDS[kind].example(4, 32)
    results = run(KINDS[kind].op, mesh, [((torch.ones(shape), *args, ["x"]), {}) for _ in range(mesh.size)])
    assert KINDS[kind].shape(shape, *args, ["x"]) == tuple(results[0].shape)


def test_local_steps_and_groups_of_one_send_nothing():
    mesh = make_mesh({"x": 1, "y": 2}, runtime="virtual")
    with record_traffic() as traffic:
        run(ops.shard.default, mesh, [((torch.ones(2), 0, 1, ["y"]), {})] * 2)
        run(ops.all_reduce.default, mesh, [((torch.ones(2), "sum", ["x"]), {})] * 2)
    assert [(0, 0)] == [transfer.sent for transfer in traffic.transfers]
    assert 0.0 == ALL_REDUCE.ring_bytes(1, 8) == traffic.sent()


@pytest.mark.parametrize(
    ("op", "rest"),
    [
        (ops.all_reduce, ("sum",)),
        (ops.all_gather, (1, 12)),
        (ops.reduce_scatter, ("sum", 1, 2)),
        (ops.all_to_all, (2, 1, 1, 12)),
        (ops.permute, ([1, 2, 0], [2, 4, 3, 5])),
        (ops.shard, (1, 2)),
        (ops.to_partial, ("max",)),
    ],
    ids=str,
)
@pytest.mark.parametrize("axis", ["x", "y"])
def test_results_are_contiguous_whatever_the_strides(op, rest, axis):
    mesh = make_mesh({"x": 1, "y": 3}, runtime="virtual")
    x = torch.randn(2, 3, 5, 4).permute(0, 3, 1, 2)
    if axis == "x":  # a group of one: nothing is cut or moved, and sizes are those of x
        rest = {ops.all_gather: (1, 4), ops.reduce_scatter: ("sum", 1, 4), ops.all_to_all: (2, 1, 3, 4)}.get(op, rest)
        rest = {ops.permute: ([0], [2, 4, 3, 5]), ops.shard: (1, 4)}.get(op, rest)
    for result in run(op.default, mesh, [((x, *rest, [axis]), {})] * 3):
        assert result.is_contiguous()
