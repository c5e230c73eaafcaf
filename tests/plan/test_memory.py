"""Predicted memory against closed forms, and against what a rank's program really holds."""

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gpt
import layouts
import spmd
from spmd import P, TensorMeta
from spmd.collectives import psum
from spmd.core.pytree import tree_map
from spmd.plan.memory.peak import Kind
from spmd.testing.live import peak_bytes
from training import Training, init

MESH = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.float32)


def gpt_metas(training: Training, batch: int = 16) -> tuple[Any, Any]:
    """The arguments of a training step, without data."""
    state = tree_map(lambda t: TensorMeta(t.shape, t.dtype), init(training.config, training.optimizer))
    tokens = TensorMeta((batch, training.config.context), torch.int64)
    return state, (tokens, tokens)


@pytest.mark.parametrize("name", layouts.STRATEGIES)
def test_a_gpt_step_holds_what_is_predicted(name: str) -> None:
    strategy = layouts.STRATEGIES[name]
    mesh = spmd.make_mesh(strategy.mesh, runtime="virtual")
    training = Training(gpt.Config(layers=2, width=32, vocab=64, context=16), strategy, mesh)
    step = training.step()
    metas = gpt_metas(training)
    assert peak_bytes(step.lower(*metas)) == step.plan(*metas).memory.peak


def transposes(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).t().reshape(-1)  # a copy
    return y.view(4, -1).relu() + x.reshape(4, -1).t().contiguous().view(4, -1).sum()


def attends(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w).view(8, 4, 2, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2).softmax(-1)


def attends_to_features(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w).view(8, 4, 2, -1).transpose(2, 3).contiguous()  # what copies it is lowering, for the kernel
    return F.scaled_dot_product_attention(q, q, q).flatten(2).softmax(-1)


def splits(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).split([3, w.shape[1] - 3], -1)
    return torch.cat([b.exp(), a[..., None].expand(*a.shape, 2).flatten(-2)], -1).cumsum(0)


def normalizes(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x @ w, (w.shape[1],)).logsumexp(-1) + F.dropout(x, 0.5).amax(-1)


def gradient(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.grad(lambda w: F.gelu(x @ w).square().mean())(w)


def gates(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.grad(lambda w: F.silu(x @ w).square().mean())(w)  # its backward subtracts from a tensor of ones


PROGRAMS = [
    (transposes, (8, 12), (12, 16)),
    (attends, (8, 4, 12), (12, 16)),
    (attends_to_features, (8, 4, 12), (12, 16)),
    (splits, (8, 12), (12, 16)),
    (normalizes, (8, 12), (12, 16)),
    (gradient, (8, 12), (12, 16)),
    (gates, (8, 12), (12, 16)),
    (gates, (7, 12), (12, 16)),
]


@pytest.mark.parametrize("specs", [(P("x"), P()), (P("x"), P("x", "y")), (P(None, "x"), P("x")), (P("y"), P())])
@pytest.mark.parametrize(("function", "x", "w"), PROGRAMS, ids=[function.__name__ for function, *_ in PROGRAMS])
def test_small_programs_hold_what_is_predicted(
    function: Any, x: tuple[int, ...], w: tuple[int, ...], specs: tuple[P, P]
) -> None:
    step = spmd.jit(function, specs, P("x"), mesh=MESH)
    assert peak_bytes(step.lower(meta(*x), meta(*w))) == step.plan(meta(*x), meta(*w)).memory.peak


def test_the_peak_in_closed_form() -> None:
    """At the second product: both arguments, the first product, and the result."""
    step = spmd.jit(lambda x, w: torch.relu(x @ w) @ w, (P("x"), P()), P("x"), mesh=MESH)
    memory = step.plan(meta(64, 32), meta(32, 32)).memory
    x, w = 32 * 32 * 4, 32 * 32 * 4
    assert memory.peak == x + w + 2 * x
    assert memory.by_kind == {Kind.INPUT: x + w, Kind.CONSTANT: 0, Kind.OUTPUT: 0, Kind.TEMPORARY: 2 * x}
    assert memory.timeline == (x + w + x, x + w + 2 * x, x + w + 2 * x)
    assert memory.operation is not None and memory.operation.name == "relu"
    assert "relu at test_memory.py:" in str(memory)


def test_views_take_no_memory() -> None:
    step = spmd.jit(lambda x: x.t().reshape(-1)[1:].sum(), P(), P(), mesh=MESH)
    assert (
        step.plan(meta(8, 64)).memory.timeline[1:3] == (2 * 8 * 64 * 4,) * 2
    )  # the reshape copies, its slice does not
    step = spmd.jit(lambda x: x.view(4, -1)[1:].t(), P(), P(), mesh=MESH)
    assert step.plan(meta(8, 64)).memory.peak == 8 * 64 * 4


def test_a_result_that_is_a_part_of_a_tensor_is_copied_at_the_end() -> None:
    step = spmd.jit(lambda x: x.t().reshape(-1)[1:], P(), P(), mesh=MESH)
    assert step.plan(meta(8, 64)).memory.peak == 2 * 8 * 64 * 4 + (8 * 64 - 1) * 4
    step = spmd.jit(lambda x: x, P(), P("x"), mesh=MESH)
    assert step.plan(meta(8, 64)).memory.peak == 8 * 64 * 4 + 4 * 64 * 4


def test_a_program_without_operations_holds_its_arguments() -> None:
    step = spmd.jit(lambda x: x, P("x"), P("x"), mesh=MESH)
    memory = step.plan(meta(8)).memory
    assert (memory.peak, memory.timeline, memory.operation) == (16, (16,), None)
    assert "the end" in str(memory)


def test_redistributions_are_held_for_a_line() -> None:
    step = spmd.jit(lambda x: x.exp(), P("x"), P(), mesh=MESH)
    memory = step.plan(meta(64)).memory
    assert (memory.operation is not None and memory.operation.name) == "redistribute"
    assert re.search(
        r"at redistribute at test_memory.py:\d+: .*\n +256  output .* by redistribute at test_m", str(memory)
    )


def test_constants_are_told_apart() -> None:
    table = torch.arange(6.0)
    memory = spmd.jit(lambda x: x + table, P(), P(), mesh=MESH).plan(meta(6)).memory
    assert memory.by_kind == {Kind.INPUT: 24, Kind.CONSTANT: 24, Kind.OUTPUT: 24, Kind.TEMPORARY: 0}


class AliveAtEachOperator(TorchDispatchMode):
    """Which of some tensors are alive after every operator."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.watched = [weakref.ref(tensor) for tensor in tensors]
        self.seen: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket is not torch.ops.aten.detach:
            self.seen.append([reference() is not None for reference in self.watched])
        return made


def test_donated_shards_are_freed_at_their_last_use() -> None:
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    step = spmd.jit(lambda x: (x.double() * 2).neg(), P("x"), P("x"), mesh=mesh, donate_argnums=0)
    for _ in range(2):  # the first call compiles, the second takes the short way
        x = spmd.distribute(torch.ones(4), P("x"), mesh)
        with AliveAtEachOperator(x.shards) as alive:
            y = step(x)
        first, second = [[True, True], [False, True], [False, True]], [[False, True], [False, False], [False, False]]
        assert alive.seen[-6:] == first + second
        assert torch.equal(y.full_tensor(), -2 * torch.ones(4).double())


def test_a_donated_value_is_dead() -> None:
    step = spmd.jit(lambda a, b: {"sum": a["w"] + b}, P("x"), P("x"), mesh=MESH, donate_argnums=0)
    w, b, plain = (spmd.distribute(torch.ones(4), P("x"), MESH) for _ in range(3))
    step({"w": w}, b)
    message = (
        r"f32\[4\] P\('x'\) was read at test_memory.py:\d+ .*, after it was donated.*Use what the function returned"
    )
    for read in (lambda: w.shards, lambda: w.full_tensor(), lambda: step({"w": w}, b), lambda: w.redistribute(P())):
        with pytest.raises(spmd.ShardingError, match=message):
            read()
    assert "donated" in repr(w)
    assert torch.equal(b.full_tensor(), torch.ones(4))
    tensor = torch.ones(4)
    step({"w": tensor}, b)
    assert torch.equal(tensor, plain.full_tensor())


def test_a_refused_call_leaves_donated_values_alone() -> None:
    step = spmd.jit(lambda a, b: a + b, P("x"), P("x"), mesh=MESH, donate_argnums=0)
    a, b = spmd.distribute(torch.ones(4), P("x"), MESH), spmd.distribute(torch.ones(4), P(), MESH)
    with pytest.raises(spmd.ShardingError, match="in_specs says"):
        step(a, b)
    assert torch.equal(a.full_tensor(), torch.ones(4))


def test_static_arguments_cannot_be_donated() -> None:
    step = spmd.jit(lambda x, n: x * n, P("x"), P("x"), mesh=MESH, static_argnums=-1, donate_argnums=1)
    with pytest.raises(spmd.TraceError, match=r"Argument 1 is static and in donate_argnums=\(1,\)"):
        step(torch.ones(4), 2)


def test_donation_lowers_the_peak() -> None:
    """Each of two layers is read twice and then replaced: with donation, old ones go as new ones come."""

    def step(layers: list[Tensor], n: int) -> list[Tensor]:
        return [(w * 2) + w for w in layers]

    size = 64 * 64 * 4 // 2
    layers = [meta(64, 64)] * 3
    peaks = []
    for donate in ((), 0):
        jitted = spmd.jit(step, P("x"), P("x"), mesh=MESH, static_argnums=1, donate_argnums=donate)
        plan = jitted.plan(layers, 2)
        peaks.append(plan.memory.peak)
        assert peak_bytes(jitted.lower(layers, 2), plan.request.donated) == plan.memory.peak
    assert peaks == [7 * size, 5 * size]


def test_a_shard_of_a_donated_argument_is_not_written_to() -> None:
    """Its memory is a part of the argument's, which can be freed as a whole only."""
    step = spmd.jit(lambda w: spmd.constrain(w, P("x")) * 2, P(), P("x"), mesh=MESH, donate_argnums=0)
    plan = step.plan(meta(64, 64))
    whole = 64 * 64 * 4
    assert whole + whole // 2 == plan.memory.peak == peak_bytes(step.lower(meta(64, 64)), plan.request.donated)


def test_masks_are_shared_between_an_embedding_and_its_gradient() -> None:
    """By lowering, so that they are held from the one to the other."""

    def gradient(table: Tensor, tokens: Tensor) -> Tensor:
        return torch.func.grad(lambda table: F.embedding(tokens, table).square().mean())(table)

    step = spmd.jit(gradient, (P("x"), P()), P("x"), mesh=MESH)
    arguments = meta(64, 4), TensorMeta((256,), torch.int64)
    assert peak_bytes(step.lower(*arguments)) == step.plan(*arguments).memory.peak


def test_the_rank_that_holds_most_counts() -> None:
    """Where only shorter shards of a manual region are repeated, their rank holds more than that at coordinate zero."""

    def body(x: Tensor) -> Tensor:
        return psum((torch.cat([x] * 4)[:4] if len(x) < 4 else x).sin(), "x")

    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    step = spmd.jit(spmd.shard_map(body, mesh, P("x"), P()), P("x"), P(), mesh=mesh)
    row = 8 * 4
    assert (3 + 12 + 4) * row == step.plan(meta(7, 8)).memory.peak
    assert (4 + 4 + 4) * row == step.plan(meta(8, 8)).memory.peak


@pytest.mark.parametrize("name", ["dp", "fsdp", "tp"])
def test_a_gpt_step_with_donated_state_holds_what_is_predicted(name: str) -> None:
    strategy = layouts.STRATEGIES[name]
    training = Training(gpt.Config(layers=2, width=64, vocab=64, context=4), strategy, spmd.make_mesh(strategy.mesh))
    step = training.step(donate_argnums=0)
    metas = gpt_metas(training, batch=8)
    plan = step.plan(*metas)
    assert plan.memory.peak == peak_bytes(step.lower(*metas), plan.request.donated)


@pytest.mark.parametrize(
    "search",
    [lambda x: x.argmax(0), lambda x: tuple(x.min(0)), lambda x: x.argmin(), lambda x: tuple(x.topk(2, 0))],
    ids=["argmax", "min", "argmin", "topk"],
)
def test_a_search_along_a_sharded_dim_makes_nothing_of_its_size(search: Callable[[Tensor], Any]) -> None:
    x, mesh = meta(2**18, 64), spmd.make_mesh({"x": 2}, runtime="abstract")
    assert spmd.jit(search, P("x"), spmd.FREE, mesh=mesh).plan(x).memory.peak < 1.1 * x.nbytes / 2


def test_the_gradient_of_a_trace_makes_no_global_matrix() -> None:
    gradient = torch.func.grad(lambda x: x.trace() ** 2)
    x, mesh = meta(2048, 2048), spmd.make_mesh({"x": 8}, runtime="abstract")
    assert spmd.jit(gradient, P("x"), P("x"), mesh=mesh).plan(x).memory.peak < 3.5 * x.nbytes / 8


def test_what_a_loop_read_is_freed_before_its_results_are_stacked() -> None:
    """A gradient keeps the exponentials of all trips, and stacks as many products."""

    def total(rows: Tensor) -> Tensor:
        return spmd.scan(lambda c, row: (c + row.exp().sum(), None), torch.zeros(()), rows)[0]

    step = spmd.jit(torch.func.grad(total), (P(),), P(), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))
    held = peak_bytes(step.lower(meta(6, 64, 64)))
    assert 3 * 6 * 64 * 64 * 4 <= held <= step.plan(meta(6, 64, 64)).memory.peak < 1.1 * held


def test_what_equal_layers_hold_is_on_one_line() -> None:
    def loss(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = torch.tanh(x @ w)
        return x.sum()

    weights, x = [torch.empty(64, 64, device="meta")] * 5, torch.empty(256, 64, device="meta")
    mesh = spmd.make_mesh({"data": 2}, runtime="abstract")
    memory = spmd.jit(torch.func.grad(loss), (P(), P("data")), P(), mesh=mesh).plan(weights, x).memory
    lines = memory.largest(100).splitlines()
    assert any(f"{5 * 64 * 64 * 4:,}  input      5 like weights_0 f32[64,64]" in line for line in lines)
    assert [" like tanh" in line or " like mm" in line for line in lines].count(True) == 1
    assert memory.peak == sum(int(line.split()[0].replace(",", "")) for line in lines)
