"""`ragged_all_to_all` against a plain loop over the ranks."""

from __future__ import annotations

import re

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_cases import (
    CASES,
    RANKS,
    WRONG,
    Case,
    check_alone,
    check_batch_of_sizes,
    check_dtype,
    check_values_and_gradients,
    error_of,
    exchange,
    planned_and_sent,
    values_and_gradients,
)

import spmd
from spmd import P
from spmd.collectives import all_to_all, axis_environment, ragged_all_to_all
from spmd.collectives.traffic import record_traffic
from spmd.errors import SpmdError

MESH = spmd.make_mesh({"x": RANKS}, runtime="virtual")
UNEVEN = CASES["uneven"]
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def placed(case, *tail):
    return spmd.distribute(case.tensors(*tail), P("x"), MESH), spmd.distribute(case.vectors, P("x"), MESH)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_a_loop(on_ranks, name):
    on_ranks(check_values_and_gradients, {"x": RANKS}, name, (3,))


@pytest.mark.parametrize("tail", [(), (2, 3), (0,)], ids=str)
def test_rows_of_any_shape(on_ranks, tail):
    on_ranks(check_values_and_gradients, {"x": RANKS}, "uneven", tail)


def test_over_two_axes(on_ranks):
    on_ranks(check_values_and_gradients, {"x": 2, "y": 2}, "uneven", (3,))


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.bfloat16, torch.complex64], ids=str)
def test_dtypes_and_strides(on_ranks, dtype):
    on_ranks(check_dtype, {"x": RANKS}, dtype)


SIZES = st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=RANKS**2, max_size=RANKS**2)
DRAWN = values_and_gradients(MESH)


@settings(max_examples=100, derandomize=True)
@given(sizes=SIZES, starts=SIZES, reverse=st.booleans())
def test_drawn_sizes_and_places(sizes, starts, reverse):
    """One program for all of them, because they are data. Starts are drawn, so that ranks send rows several times."""
    packed = Case.packed(torch.tensor(sizes).view(RANKS, RANKS).tolist(), reverse)
    case = attrs.evolve(packed, starts=torch.tensor(starts).view(RANKS, RANKS), rows=10, capacity=22)
    tensors = case.tensors(1)
    gradients, found = DRAWN(*tensors, *case.vectors)
    torch.testing.assert_close(found.full_tensor(), case.loop(*tensors), rtol=0, atol=0)
    expected = torch.func.grad(lambda *both: (case.loop(*both) ** 3).sum(), (0, 1))(*tensors)
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got.full_tensor(), wanted)


def test_axes_in_another_order():
    mesh = spmd.make_mesh({"y": 2, "x": 2}, runtime="virtual")
    operand, output = UNEVEN.tensors(3)
    found = exchange(mesh, ("x", "y"))(operand, output, *UNEVEN.vectors)
    torch.testing.assert_close(found.full_tensor(), UNEVEN.loop(operand, output), rtol=0, atol=0)


def test_a_group_of_one_rank(on_ranks):
    on_ranks(check_one_rank, {"x": 1})


def check_one_rank(mesh):
    vector = lambda value: torch.tensor([value])  # noqa: E731
    found = exchange(mesh)(torch.arange(4.0), torch.zeros(5), vector(1), vector(2), vector(3), vector(2))
    assert [0.0, 0.0, 0.0, 1.0, 2.0] == found.full_tensor().tolist()


@each_case
def test_the_transpose_is_the_adjoint(case):
    (operand, output), vectors = placed(case, 2)
    result, vjp = torch.func.vjp(lambda *both: exchange(MESH)(*both, *vectors), operand, output)
    cotangent = torch.randn_like(case.tensors(2)[1])
    gradients = vjp(spmd.distribute(cotangent, P("x"), MESH))
    forward = (result.full_tensor() * cotangent).sum()
    backward = sum((g.full_tensor() * x).sum() for g, x in zip(gradients, case.tensors(2), strict=True))
    torch.testing.assert_close(backward, forward)


@each_case
def test_the_transpose_of_the_transpose_is_the_operation(case):
    """As a function of its cotangent, a vjp is linear; its own transpose sends rows as the operation does."""
    (operand, output), vectors = placed(case, 2)
    _, vjp = torch.func.vjp(lambda x: exchange(MESH)(x, output, *vectors), operand)
    _, twice = torch.func.vjp(lambda g: vjp(g)[0], output)
    given = case.tensors(2)[0]
    expected = case.loop(given, torch.zeros_like(case.tensors(2)[1]))
    found = twice(operand)[0].full_tensor()
    torch.testing.assert_close(found, expected)


@each_case
def test_second_order_and_forward_mode(case):
    tensors, vectors = placed(case, 1)
    plain = case.tensors(1)
    both = lambda f: lambda *pair: (f(*pair) ** 3).sum()  # noqa: E731
    ours, wanted = both(lambda *pair: exchange(MESH)(*pair, *vectors)), both(case.loop)
    tangents = tuple(torch.cos(x) for x in plain)
    forward = torch.func.jvp(ours, tensors, tuple(torch.cos(x) for x in tensors))[1]
    torch.testing.assert_close(forward.full_tensor(), torch.func.jvp(wanted, plain, tangents)[1])
    found = torch.func.hessian(ours, argnums=0)(*tensors).full_tensor()
    torch.testing.assert_close(found, torch.func.hessian(wanted, argnums=0)(*plain))


@pytest.mark.parametrize("in_dims", [(0, None), (1, 0), (None, 2)], ids=str)
def test_a_batch_of_rows_is_sent_at_once(in_dims):
    operand, output = UNEVEN.tensors(3)
    pairs = [
        [x * factor if dim is not None else x for x, dim in zip((operand, output), in_dims, strict=True)]
        for factor in (1, 2)
    ]
    stacked = [
        x if dim is None else torch.stack([pair[number] for pair in pairs], dim)
        for number, (x, dim) in enumerate(zip((operand, output), in_dims, strict=True))
    ]
    mapped = spmd.jit(lambda a, b, *v: torch.vmap(lambda a, b: exchange(MESH)(a, b, *v), in_dims)(a, b), P(), mesh=MESH)
    found = mapped(*stacked, *UNEVEN.vectors).full_tensor()
    torch.testing.assert_close(found, torch.stack([UNEVEN.loop(*pair) for pair in pairs]), rtol=0, atol=0)
    sent = [comm for comm in mapped.plan(*stacked, *UNEVEN.vectors).comms if "ragged" in comm.cause]
    assert [operand.nbytes / RANKS * (1 if in_dims[0] is None else 2)] == [comm.bytes for comm in sent]


def test_a_batch_of_sizes_is_a_loop(on_ranks):
    """Every element of a batch is sent elsewhere; gradients too."""
    on_ranks(check_batch_of_sizes, {"x": RANKS})


def test_a_rank_alone_moves_its_own_rows(on_ranks):
    on_ranks(check_alone, {"x": 1})


@pytest.mark.parametrize(("spec", "columns"), [(P("x"), 1), (P("x", "y"), 2)], ids=str)
def test_other_dims_stay_automatic(spec, columns):
    """Along an axis that is not manual the columns of rows can stay sharded, and the rows cannot."""
    mesh = spmd.make_mesh({"x": RANKS, "y": 2}, runtime="virtual")
    operand, output = UNEVEN.tensors(4)
    run = exchange(mesh, ("x",), axis_names={"x"})
    step = spmd.jit(run, (spec, spec, P("x"), P("x"), P("x"), P("x")), spec, mesh=mesh)
    found = step(operand, output, *UNEVEN.vectors)
    torch.testing.assert_close(found.full_tensor(), UNEVEN.loop(operand, output), rtol=0, atol=0)
    (comm,) = [comm for comm in step.plan(operand, output, *UNEVEN.vectors).comms if "ragged" in comm.cause]
    assert operand.nbytes / RANKS / columns == comm.bytes


def test_an_unreduced_value_along_another_axis_stays_one():
    mesh = spmd.make_mesh({"x": RANKS, "y": 2}, runtime="virtual")
    operand, output = UNEVEN.tensors(3)

    def body(operand, output, *vectors):
        operand, output = (spmd.collectives.pcast(x.cos(), "y", to="unreduced") for x in (operand, output))
        return spmd.collectives.psum(ragged_all_to_all(operand, output, *vectors, axis_name="x"), "y")

    run = spmd.shard_map(body, mesh, (P(("y", "x")), P(("y", "x")), P("x"), P("x"), P("x"), P("x")), P("x"))
    found = run(torch.cat([operand, -2 * operand]), torch.cat([output, -2 * output]), *UNEVEN.vectors)
    expected = UNEVEN.loop(operand.cos() + (2 * operand).cos(), output.cos() + (2 * output).cos())
    torch.testing.assert_close(found.full_tensor(), expected)


def test_the_plan_shows_an_upper_bound_and_says_so(on_ranks):
    row = 3 * 8
    for planned, ran in on_ranks(planned_and_sent, {"x": RANKS}):
        gather, forward, backward = planned
        assert ["all_gather", "all_to_all", "all_to_all"] == [comm.kind for comm in planned]
        assert gather.bytes == (RANKS - 1) * 6 * RANKS * 8
        assert (UNEVEN.rows * row, UNEVEN.capacity * row) == (forward.bytes, backward.bytes)
        assert all("at most: its sizes are data" in comm.cause for comm in (forward, backward))
        assert all(comm.source.file.endswith("ragged_cases.py") for comm in planned)
        for comm, found in zip(planned, ran, strict=bool(ran)):  # virtual ranks run no functional collectives
            assert found.bytes <= comm.bytes


def test_traffic_is_what_was_sent_to_others():
    step = values_and_gradients(MESH)
    arguments = (*UNEVEN.tensors(3), *UNEVEN.vectors)
    with record_traffic() as traffic:
        step(*arguments)
    sent = (UNEVEN.sizes.sum(1) - UNEVEN.sizes.diag()) * 3 * 8
    received = (UNEVEN.sizes.sum(0) - UNEVEN.sizes.diag()) * 3 * 8
    assert [tuple(sent.tolist()), tuple(received.tolist())] == [transfer.sent for transfer in traffic.transfers[1:]]


MESSAGES = {
    "sizes": r"DivergenceError: ragged_all_to_all: rank 0 sends 2 rows to rank 1, which expects 3 of it\.",
    "operand": r"SpmdError: .*rank 1 sends to rank 3 rows 9 to 11 of the operand of rank 1, which has 10 rows",
    "output": r"SpmdError: .*rank 0 sends to rank 1 rows -1 to 1 of the output of rank 1, which has 10 rows",
    "twice": r"SpmdError: .*ranks 0 and 1 both send to rows 1 to 3 of the output of rank 0",
    "negative": r"SpmdError: .*send_sizes of rank 0 has -1 for rank 0\. Expected no negative sizes",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sizes_are_an_error_on_every_rank(on_ranks, name):
    found = on_ranks(error_of, {"x": RANKS}, name)
    assert re.match(MESSAGES[name], found[0]), found[0]
    assert {message.splitlines()[0] for message in found} == {found[0].splitlines()[0]}
    for message in found:
        assert re.search(r"\n  In \S*ragged_all_to_all.* of this rank, at ragged_cases.py:\d+", message), message


META = torch.empty(6, 3, device="meta")
VECTOR = torch.empty(RANKS, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((META, META, VECTOR.float(), *[VECTOR] * 3), r"'input_offsets' must be .* length 4.* \(got f32\[4\]\)"),
        ((META, META, VECTOR, VECTOR[1:], VECTOR, VECTOR), r"'send_sizes' must be an .* \(got i64\[3\]\)"),
        ((META, META, VECTOR, VECTOR, [1, 2, 3, 4], VECTOR), r"'output_offsets' must be .* \(got list\)"),
        ((META, META, VECTOR, VECTOR, VECTOR, VECTOR.bool()), r"'recv_sizes' must be .* \(got b8\[4\]\)"),
        ((META, META[:, 1:], *[VECTOR] * 4), r"differ in dim 0 only \(got f32\[6,3\] and f32\[6,2\]\)"),
        ((META, META.double(), *[VECTOR] * 4), r"must have one dtype.* \(got f32\[6,3\] and f64\[6,3\]\)"),
        ((META[0, 0], META, *[VECTOR] * 4), r"'operand' must be a tensor of at least one dim \(got f32\[\]\)"),
    ],
    ids=["float", "length", "list", "bool", "shape", "dtype", "0-d"],
)  # fmt: skip
def test_wrong_arguments_are_errors_at_trace_time(arguments, message):
    with axis_environment({"x": RANKS}), pytest.raises(SpmdError, match=message):
        ragged_all_to_all(*arguments, axis_name="x")


def test_groups_are_refused():
    with axis_environment({"x": RANKS}), pytest.raises(SpmdError, match="axis_index_groups is not supported"):
        ragged_all_to_all(META, META, *[VECTOR] * 4, axis_name="x", axis_index_groups=[[0, 1], [2, 3]])


def test_received_sizes_by_all_to_all():
    """The idiom of the documentation: sizes that only the sender knows."""

    def body(operand, output, starts, sizes, places):
        received = all_to_all(sizes, "x", 0, 0, tiled=True)
        return ragged_all_to_all(operand, output, starts, sizes, places, received, axis_name="x")

    operand, output = UNEVEN.tensors(3)
    found = spmd.shard_map(body, MESH, P("x"), P("x"))(operand, output, *UNEVEN.vectors[:3])
    torch.testing.assert_close(found.full_tensor(), UNEVEN.loop(operand, output), rtol=0, atol=0)
