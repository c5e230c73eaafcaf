"""`examples/ring_attention.py` against torch's attention on one device: values, gradients, bytes and memory."""

import functools
import math

import pytest
import torch
from sampling import product, sample
from torch.nn.functional import scaled_dot_product_attention
from workers import call_on_mesh

import ring_attention
import spmd
from ring_attention import Ring
from spmd import P
from spmd.collectives.traffic import record_traffic

EVEN = [(1, 8), (2, 8), (4, 24), (8, 16)]
UNEVEN = [(2, 7), (4, 10), (4, 9), (4, 3), (8, 9), (8, 1)]
"""Ranks and lengths: the last block shorter, and one, two or more of them empty."""

CASES = [(*at, causal) for at in EVEN + UNEVEN for causal in (False, True)]
FAST = [(1, 8, False), (2, 8, True), (4, 24, False), (2, 7, False), (4, 9, True), (4, 3, False), (8, 1, True)]
each_case = pytest.mark.parametrize("case", sample(CASES, FAST))


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "causal"])
def causal(request):
    return request.param


def inputs(length, batch=2, heads=3, features=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    *qkv, target = (torch.randn(batch, heads, length, features, dtype=dtype, generator=generator) for _ in range(4))
    return tuple(qkv), target


@functools.cache
def virtual_step(ranks, length, causal):
    """`make_step` on virtual ranks, which two tests share."""
    return ring_attention.make_step(spmd.make_mesh({"seq": ranks}, runtime="virtual"), length, causal=causal)


def assert_is_attention_of_one_device(length, causal, mesh, step=None):
    step = step or ring_attention.make_step(mesh, length, causal=causal)
    qkv, target = inputs(length)
    attention = ring_attention.make_attention(mesh, length, causal=causal)
    wanted = scaled_dot_product_attention(*qkv, is_causal=causal)
    torch.testing.assert_close(attention(*qkv).full_tensor(), wanted)
    grads, loss = step(qkv, target)
    wanted_grads, wanted_loss = ring_attention.on_one_device(qkv, target, causal)
    torch.testing.assert_close(
        [loss.full_tensor(), *(grad.full_tensor() for grad in grads)], [wanted_loss, *wanted_grads]
    )


@each_case
def test_values_and_gradients(case):
    ranks, length, causal = case
    mesh = spmd.make_mesh({"seq": ranks}, runtime="virtual")
    assert_is_attention_of_one_device(length, causal, mesh, virtual_step(ranks, length, causal))


ON_PROCESSES = [(2, 7, True), (4, 8, False), (4, 8, True), (4, 10, False), (4, 10, True)]


@pytest.mark.parametrize("case", sample(ON_PROCESSES, ON_PROCESSES[:2]))
def test_values_and_gradients_on_processes(workers, case):
    ranks, length, causal = case
    check, axes = functools.partial(assert_is_attention_of_one_device, length, causal), {"seq": ranks}
    workers.run(call_on_mesh, check, axes, "distributed", ranks=ranks)


def test_batch_over_another_axis(causal):
    mesh = spmd.make_mesh({"data": 2, "seq": 4}, runtime="virtual")
    qkv, target = inputs(8)
    spec = P("data", None, "seq")
    attention = ring_attention.make_attention(mesh, 8, causal=causal)
    step = torch.func.grad_and_value(lambda qkv, target: ring_attention.distance(attention(*qkv), target))
    jitted = spmd.jit(step, (spec, spec), (spec, P()), mesh=mesh)
    grads, _ = jitted(qkv, target)
    wanted, _ = ring_attention.on_one_device(qkv, target, causal)
    torch.testing.assert_close([grad.full_tensor() for grad in grads], list(wanted))
    assert {("seq",)} == {comm.axes for comm in jitted.plan(qkv, target).comms if comm.kind == "permute"}


def test_second_derivatives_and_vmap(causal):
    mesh = spmd.make_mesh({"seq": 4}, runtime="virtual")
    qkv, direction = inputs(8, batch=1, heads=1)
    attention = ring_attention.make_attention(mesh, 8, causal=causal)

    def curvature(function):
        loss = lambda qkv: function(*qkv).sin().sum()  # noqa: E731
        return lambda qkv: torch.func.grad(lambda qkv: (torch.func.grad(loss)(qkv)[1] * direction).sum())(qkv)

    one_device = lambda q, k, v: (q @ k.mT / 2).masked_fill(mask(causal), -math.inf).softmax(-1) @ v  # noqa: E731
    spec = ring_attention.SEQUENCE
    found = spmd.jit(curvature(attention), spec, spec, mesh=mesh)(qkv)
    torch.testing.assert_close([x.full_tensor() for x in found], list(curvature(one_device)(qkv)))
    batched = spmd.jit(torch.func.vmap(attention), P(None, *spec.dims), P(None, *spec.dims), mesh=mesh)
    stacks = [torch.stack([x, x + 1]) for x in qkv]
    torch.testing.assert_close(batched(*stacks).full_tensor(), torch.func.vmap(one_device)(*stacks))


def mask(causal):
    return torch.ones(8, 8, dtype=torch.bool).triu(1) if causal else torch.zeros(8, 8, dtype=torch.bool)


def test_bfloat16_sums_in_float32(causal):
    qkv, target = inputs(16, dtype=torch.bfloat16)
    mesh = spmd.make_mesh({"seq": 4}, runtime="virtual")
    grads, _ = ring_attention.make_step(mesh, 16, causal=causal)(qkv, target)
    wanted, _ = ring_attention.on_one_device(tuple(x.float() for x in qkv), target.float(), causal)
    for grad, want in zip(grads, wanted, strict=True):
        assert torch.bfloat16 == grad.dtype
        torch.testing.assert_close(grad.full_tensor().float(), want, rtol=0.03, atol=0.03 * want.abs().max().item())


@each_case
def test_bytes_are_the_closed_form(case):
    ranks, length, causal = case
    qkv, target = inputs(length)
    block = -(-length // ranks)
    holding = -(-length // block)
    nbytes = 2 * 3 * block * 4 * 8
    step = virtual_step(ranks, length, causal)
    permutes = [comm.bytes for comm in step.plan(qkv, target).comms if comm.kind == "permute"]
    assert [float(nbytes)] * (6 * (holding - 1)) == permutes
    assert sum(permutes) == ring_attention.bytes_of_step(Ring.of("seq", length, ranks, causal), nbytes)
    with record_traffic() as traffic:
        step(qkv, target)
    sends = holding * (holding - 1) // (2 if causal else 1)  # of a block, by all ranks together
    assert 6 * sends * nbytes == sum(sum(transfer.sent) for transfer in traffic.transfers if transfer.kind == "permute")


def test_memory_is_that_of_the_own_block(causal):
    """With blocks of one size, memory does not grow with their number, as it does if all that come by are kept."""

    def peak(ranks, save):
        length = 16 * ranks
        step = ring_attention.make_step(
            spmd.make_mesh({"seq": ranks}, runtime="abstract"), length, causal=causal, save=save
        )
        return step.plan(*inputs(length, dtype=torch.float32)).memory.peak

    block = inputs(16, dtype=torch.float32)[1].nbytes
    own, everything = ([peak(ranks, save) for ranks in (4, 6, 8)] for save in ("own", "all"))
    assert max(own) - min(own) <= 8 * 16  # a number for each step
    assert everything[1] - everything[0] >= 2 * 2 * block
    assert everything[2] - everything[1] >= 2 * 2 * block


@pytest.mark.parametrize(("at", "causal"), product([(8, 4 * 3), (10, (4 + 2) * 3)], [False, True]))
def test_gradients_from_outside_let_blocks_go_round_again(at, causal):
    """The forward program sends keys and values only, so it keeps no block that the backward pass receives.

    Of uneven shards it keeps no value at all, and the backward program makes the forward values again.
    """
    length, received = at
    mesh = spmd.make_mesh({"seq": 4}, runtime="virtual")
    attention = ring_attention.make_attention(mesh, length, causal=causal)
    qkv, target = inputs(length)
    placed = [spmd.distribute(x, ring_attention.SEQUENCE, mesh).requires_grad_() for x in qkv]
    with spmd.comms_of() as forward:
        out = attention(*placed)
    with spmd.comms_of() as backward:
        out.backward(spmd.distribute(target, ring_attention.SEQUENCE, mesh))
    assert [{"permute": 2 * 3}, {"permute": received}] == [forward.count(), backward.count()]
    _, pullback = torch.func.vjp(lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=causal), *qkv)
    torch.testing.assert_close([x.grad.full_tensor() for x in placed], list(pullback(target)))


@pytest.mark.parametrize(("length", "causal"), product([8, 10], [False, True]))
def test_without_jit(length, causal):
    with spmd.disable_jit():
        assert_is_attention_of_one_device(length, causal, spmd.make_mesh({"seq": 4}, runtime="virtual"))


def test_a_masked_block_is_not_sent():
    ring = Ring.of("seq", 8, 4, causal=True)
    received = {(step, receiver) for step in ring.steps for _, receiver in ring.onward(step)}
    assert {(step, rank) for step in (1, 2, 3) for rank in range(step, 4)} == received


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [8, 10])
def test_every_key_is_seen_once(causal, length):
    """By the masks of all steps on all ranks, run as a body."""
    ring = Ring.of("seq", length, 4, causal)

    def body(x):
        hidden = [ring.hidden(step, x.device) for step in range(ring.ranks)]
        seen = [
            torch.ones(ring.block, ring.block) if mask is None else (~mask).expand(ring.block, ring.block)
            for mask in hidden
        ]
        return torch.stack(seen).sum((0, 2)) + 0 * x

    mesh = spmd.make_mesh({"seq": 4}, runtime="virtual")
    counts = spmd.shard_map(body, mesh, P("seq"), P("seq"))(torch.zeros(4 * ring.block)).full_tensor()[:length]
    assert (list(range(1, length + 1)) if causal else [length] * length) == counts.int().tolist()


@pytest.mark.parametrize("ranks", ["1", "4"])
def test_example_runs(ranks, capsys):
    assert 0 == ring_attention.main(["--ranks", ranks, "--length", "32"])
    assert 2 == capsys.readouterr().out.count("differ from one device's by")
