"""What a jitted function does on a mesh, whatever its runtime: each case compares with the function on one device."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from stock_models import assert_trains_alike

from spmd import (
    DTensor,
    Machine,
    P,
    collectives,
    debug,
    disable_jit,
    distribute,
    jit,
    process_index,
    pure_callback,
    shard_map,
)
from spmd.core.mesh import Mesh
from spmd.errors import SpmdError

SEEN: list[Any] = []


@torch.library.custom_op("spmd_runtime_cases::note", mutates_args=())
def note(x: torch.Tensor) -> None:
    SEEN.append(x.tolist())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Any, **options: Any) -> Any:
    """Call a function twice on the mesh and on one device, with the same seeds, and compare; returns the results."""
    step = jit(function, in_specs, out_specs, mesh=mesh, **options)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = optree.tree_leaves(function(*args))
        torch.manual_seed(seed)
        results = step(*args)
        for actual, wanted in zip(optree.tree_leaves(results), expected, strict=True):
            torch.testing.assert_close(actual.full_tensor(), wanted, rtol=1e-5, atol=1e-6)
    return results


def gradients_of_uneven_shards(mesh: Mesh) -> None:
    loss = lambda w, x: torch.tanh(x @ w).square().mean()  # noqa: E731
    gradients = torch.func.grad_and_value(loss, argnums=(0, 1))
    check(mesh, gradients, (P(None, "y"), P("x", "y")), ((P("x"), P("y")), P()), normal(5, 3), normal(7, 5))


def buckets(mesh: Mesh) -> None:
    """Collectives that are launched as one: sums, and gathers along several dims, of uneven and empty shards too."""
    params = {"up": normal(6, 4), "bias": normal(5), "down": normal(4, 5), "gain": normal(1), "scale": normal(3, 2, 2)}
    held = {"up": P("x"), "bias": P("x"), "down": P(None, "x"), "gain": P("x"), "scale": P(None, "x", "y")}

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ params["up"]) @ params["down"] + params["bias"]
        return (hidden.square().mean() + hidden.mean()) * params["gain"].sum() + params["scale"].square().sum()

    def step(params: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        gradients = torch.func.grad(loss)(params, x)
        return {name: params[name] - 0.1 * gradients[name] for name in params}

    machine = Machine(latency=0.0)  # it sends gradients, not examples
    for specs in (held, P()):
        check(mesh, step, (specs, P(("x", "y"))), specs, params, normal(203, 6), machine=machine)
        check(mesh, torch.func.grad(loss), (specs, P("x")), specs, params, normal(200, 6), machine=machine)
    comms = jit(step, (held, P(("x", "y"))), held, mesh=mesh, machine=machine).plan(params, normal(203, 6)).comms
    assert len({comm.launch for comm in comms}) < len(comms)


def buckets_of_exchanges(mesh: Mesh) -> None:
    """Shards of other dims, several in one launch, of uneven and empty shards too."""
    tree = {"a": normal(8, 4), "b": normal(5, 7), "c": normal(1, 3), "d": normal(6, 2, 3)}
    before, after, machine = P(("x", "y")), P(None, ("x", "y")), Machine(latency=0.0)
    double = lambda tree: {name: 2 * value for name, value in tree.items()}  # noqa: E731
    check(mesh, double, (before,), after, tree, machine=machine)
    comms = jit(double, (before,), after, mesh=mesh, machine=machine).plan(tree).comms
    exchanges = [comm for comm in comms if comm.kind == "all_to_all"]
    assert len({comm.launch for comm in exchanges}) < len(exchanges)


def empty_shards(mesh: Mesh) -> None:
    function = lambda x: (x.sum(0), x.amax(1), torch.func.grad(lambda x: x.logsumexp(0).sum())(x))  # noqa: E731
    check(mesh, function, P(("x", "y")), (P(), P("x"), P("y")), normal(1, 5))


def draws_in_program_order(mesh: Mesh) -> None:
    def function(x: torch.Tensor) -> Any:
        first = torch.rand_like(x)
        torch.rand(3)  # nobody reads it
        return F.dropout(x.t(), 0.3), first + torch.randn(6, 4), torch.randperm(6)

    check(mesh, function, P("x", "y"), (P("y"), P("x"), P()), normal(6, 4))


def several_results(mesh: Mesh) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> Any:
        normed, mean, _ = torch.native_layer_norm(x, [6], weight, None, 1e-5)
        top, _ = x.topk(2, 1)
        left, _, right = x.split(2, 1)
        return normed, mean, top, left * right

    check(mesh, function, (P("x", "y"), P("y")), (P("x"), P(), P("y"), P("x")), normal(4, 6), normal(6))


def local_implementations(mesh: Mesh) -> None:
    """Operators that are not themselves on a shard: softmax, scans, lookups, losses over the dim that is sharded."""
    ids = torch.tensor([[0, 5], [9, 3], [7, 7]])

    def function(table: torch.Tensor) -> Any:
        rows = F.embedding(ids, table)
        return F.cross_entropy(rows.view(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])), table.cumsum(0), table.argmax(0)

    gradient = lambda table: torch.func.grad(lambda table: function(table)[0])(table)  # noqa: E731
    check(mesh, function, P(("x", "y")), (P(), P("y"), P()), normal(10, 4))
    check(mesh, gradient, P("x", "y"), P("x", "y"), normal(10, 4))


def closed_over_tensors(mesh: Mesh) -> None:
    """A result that is one is a copy."""
    table = normal(4, 3)
    before = table.clone()
    _, same = check(mesh, lambda x: (x * table, table), P("x"), (P("x"), P()), normal(4, 3, seed=1))
    same.full_tensor().zero_()
    assert torch.equal(before, table)
    check(mesh, lambda x: (x * table, table), P("x"), (P("x"), P()), normal(4, 3, seed=1))


def lists_of_tensors(mesh: Mesh) -> None:
    """List operators, over tensors of different specs; some of their operands are shared."""
    params = [normal(4, 6), normal(6), normal(8, 2)]
    grads = [normal(4, 6, seed=1), normal(6, seed=1), normal(8, 2, seed=1)]

    def function(params: list[torch.Tensor], grads: list[torch.Tensor]) -> Any:
        scaled = torch._foreach_mul(grads, [0.5, 2.0, -1.0])
        moved = torch._foreach_add(params, scaled, alpha=0.1)
        return moved, torch._foreach_addcmul(moved, params, grads), torch._foreach_norm(grads)

    specs = [P("x"), P(), P("x", "y")]
    check(mesh, function, (specs, specs), (tuple(specs), tuple(specs), P()), params, grads)


def reshapes_of_shards(mesh: Mesh) -> None:
    def function(x: torch.Tensor) -> Any:
        flat = x.reshape(12, 4)
        return flat @ flat.t(), x.transpose(0, 1).reshape(3, 16), x.movedim(2, 0).contiguous().view(-1)

    check(mesh, function, P("x", None, "y"), (P("x", "y"), P("y"), P("x")), normal(4, 3, 4))


def kernels_that_read_strides(mesh: Mesh) -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        q = q.transpose(-1, -2).contiguous()
        return F.scaled_dot_product_attention(q, q, q)

    gradient = torch.func.grad(lambda q: attend(q).sin().sum())
    check(mesh, lambda q: (attend(q), gradient(q)), P("x", "y"), (P("x", "y"), P("y")), normal(4, 2, 8, 6))


def training_steps(mesh: Mesh) -> None:
    """State that goes from step to step on the mesh, against the same on one device."""

    def function(state: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
            return (torch.relu(x @ params["a"]) @ params["b"]).square().mean()

        grads, value = torch.func.grad_and_value(loss)(state)
        return optree.tree_map(lambda p, g: p - 0.1 * g, state, grads), value

    specs = {"a": P("x", "y"), "b": P("y")}
    state = {"a": normal(6, 8), "b": normal(8, 2)}
    step = jit(function, (specs, P("x")), (specs, P()), mesh=mesh, donate_argnums=0)
    placed = {name: distribute(value, specs[name], mesh) for name, value in state.items()}
    for number in range(3):
        x = normal(10, 6, seed=number)
        given = placed
        placed, actual = step(placed, distribute(x, P("x"), mesh))
        state, expected = function(state, x)
        torch.testing.assert_close(actual.full_tensor(), expected)
        try:
            given["a"].full_tensor()
        except SpmdError:
            continue
        raise AssertionError("a donated argument can be read")


def sums_in_another_dtype(mesh: Mesh) -> None:
    x, w = normal(6, 16).bfloat16(), normal(16, 7, seed=1).bfloat16()
    step = jit(torch.mm, (P(None, ("x", "y")), P(("x", "y"))), P("y"), mesh=mesh, reduce_dtype=torch.float32)
    ranks = mesh.axis_size(("x", "y"))
    parts = [(a @ b).float() for a, b in zip(x.chunk(ranks, 1), w.chunk(ranks), strict=True)]
    torch.testing.assert_close(step(x, w).full_tensor(), sum(parts).bfloat16())


def redistributions(mesh: Mesh) -> None:
    x = normal(7, 5)
    placed = distribute(x, P("x", "y"), mesh)
    for spec in (P("y", "x"), P(("y", "x")), P(), P(None, ("x", "y")), P("y"), P("x", "y")):
        placed = placed.redistribute(spec)
        assert torch.equal(x, placed.full_tensor())


def free_results(mesh: Mesh) -> None:
    """Their specs are the planner's choice, the same on every rank."""
    function = lambda x, w: (x @ w, (x @ w).flatten(0, 1), torch.func.grad(lambda w: (x @ w).square().sum())(w), x)  # noqa: E731
    check(mesh, function, (P("x", "y"), P(None, None, "y")), None, normal(3, 2, 6), normal(3, 6, 5))


def gradients_from_outside(mesh: Mesh) -> None:
    """Of a jitted function, by autograd and by torch.func."""

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(x @ w), 0.3).square().mean()

    step = jit(loss, (P(None, "y"), P("x")), mesh=mesh)
    args = normal(6, 5), normal(7, 6, seed=1)
    placed = distribute(args, (P(None, "y"), P("x")), mesh)
    transforms: tuple[Callable[..., Any], ...] = (
        torch.func.grad,
        lambda f: lambda w, x: torch.func.jvp(lambda w: f(w, x), (w,), (w,))[1],
        lambda f: torch.func.grad(lambda *args: torch.func.grad(f)(*args).square().sum()),
    )
    for transform in transforms:
        torch.manual_seed(0)
        expected = transform(loss)(*args)
        torch.manual_seed(0)
        torch.testing.assert_close(transform(step)(*placed).full_tensor(), expected, rtol=1e-5, atol=1e-6)
    placed[0].requires_grad_()
    torch.manual_seed(0)
    step(*placed).backward()
    torch.manual_seed(0)
    expected = torch.func.grad(loss)(*args)
    torch.testing.assert_close(placed[0].grad.full_tensor(), expected, rtol=1e-5, atol=1e-6)


def gradients_of_moves(mesh: Mesh) -> None:
    """Through redistribute, full_tensor and from_local, twice."""
    value = normal(5, 6).double()
    x = distribute(value, P("x", "y"), mesh).requires_grad_()
    cubes = x.redistribute(P("y")).pow(3).redistribute(P(None, "x")).full_tensor()
    (gradient,) = torch.autograd.grad(cubes.sum() + x.sum().full_tensor(), x, create_graph=True)
    torch.testing.assert_close(gradient.full_tensor(), 3 * value**2 + 1)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    torch.testing.assert_close(second.full_tensor(), 2 * (3 * value**2 + 1) * 6 * value)

    spec = P("x", partial={"y": "sum"})
    parts = [shard.clone().requires_grad_() for shard in distribute(value, spec, mesh).shards]
    joined = DTensor.from_local(parts, mesh, spec)
    gradients = torch.autograd.grad(joined.pow(3).sum(), parts, create_graph=True)
    expected = distribute(3 * value**2, P("x"), mesh).shards
    torch.testing.assert_close(gradients, expected)
    again = torch.autograd.grad(sum(gradient.sum() for gradient in gradients), parts)
    torch.testing.assert_close(again, distribute(6 * value * mesh.axis_size("y"), P("x"), mesh).shards)


def operators_outside_jit(mesh: Mesh) -> None:
    """A stock layer and optimizer on DTensors, with writes and reads."""

    def train(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> Any:
        weight.requires_grad_(), bias.requires_grad_()
        optimizer, losses = torch.optim.AdamW([weight, bias], 0.1), []
        for _ in range(2):
            loss = F.linear(x, weight, bias).relu().square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([weight, bias], 0.3)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            weight[0] = 1.0
            weight.t()[1].add_(bias)
        return torch.tensor(losses), weight.detach(), bias.detach(), F.dropout(weight.detach(), 0.5)

    args = normal(5, 3), normal(5, seed=1), normal(7, 3, seed=2)
    torch.manual_seed(0)
    expected = train(*(arg.clone() for arg in args))
    torch.manual_seed(0)
    results = train(*distribute(args, (P("x"), P(), P(("x", "y"))), mesh))
    for actual, wanted in zip(results, expected, strict=True):
        whole = actual.full_tensor() if isinstance(actual, DTensor) else actual
        torch.testing.assert_close(whole, wanted, rtol=1e-5, atol=1e-6)


def a_stock_encoder(mesh: Mesh) -> None:
    """A stock module with tensor-parallel parameters, trained by a stock optimizer."""
    assert_trains_alike("encoder", "tp", mesh)


def a_stock_resnet(mesh: Mesh) -> None:
    """A stock module with fully sharded parameters and statistics of batches."""
    assert_trains_alike("resnet", "fsdp", mesh)


def printing(mesh: Mesh) -> None:
    """Lines in rank order, from process 0 only; between collectives that are in flight."""

    def function(x: torch.Tensor) -> torch.Tensor:
        debug.print("x {}", x[0])
        total = collectives.psum(x, "x")
        debug.print("total {} on {}", total[0], collectives.axis_index(("x", "y")))
        return total

    x = torch.arange(6.0)
    expected = [f"[rank {rank}] x {float(rank)}" for rank in range(mesh.size)]
    sums = x[: mesh.size].view(-1, mesh.axis_size("y")).sum(0).tolist() * mesh.axis_size("x")
    expected += [f"[rank {rank}] total {total} on {rank}" for rank, total in enumerate(sums)]
    step = shard_map(function, mesh, P(("x", "y")), P("y"))
    for _ in range(2):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            step(x[: mesh.size])
        assert printed.getvalue().splitlines() == (expected if process_index() == 0 else [])


def host_calls(mesh: Mesh) -> None:
    """Operators without results and functions of the host: on each rank of this process, in order."""
    x, ranks = torch.arange(6.0), [mesh.rank(coordinate) for coordinate in mesh.held_coordinates]

    def function(x: torch.Tensor) -> torch.Tensor:
        note(x)
        debug.callback(lambda total: SEEN.append(total.item()), x.sum())
        torch._assert_async((x < 10).all(), "too big")
        return pure_callback(lambda x: x.numpy() * 2, x, x) + x  # type: ignore[no-any-return]

    def body(x: torch.Tensor) -> torch.Tensor:
        note(collectives.axis_index(("x", "y")))
        total = collectives.psum(x, ("x", "y"))
        debug.callback(note, total)
        return pure_callback(lambda x: x + 1, x, x)  # type: ignore[no-any-return]

    step, mapped = jit(function, P(("x", "y")), mesh=mesh), shard_map(body, mesh, P(("x", "y")), P(("x", "y")))
    for _ in range(2):
        SEEN.clear()
        assert torch.equal(x * 3, step(x).full_tensor())
        assert [x.tolist()] * len(ranks) + [15.0] * len(ranks) == SEEN
        SEEN.clear()
        assert torch.equal(x[: mesh.size] + 1, mapped(x[: mesh.size]).full_tensor())
        assert [*ranks, *[[x[: mesh.size].sum().item()]] * len(ranks)] == SEEN
    with disable_jit():
        SEEN.clear()
        mapped(x[: mesh.size])
        assert [*ranks, *[[x[: mesh.size].sum().item()]] * len(ranks)] == SEEN
    SEEN.clear()
    sharded = distribute(x, P("y"), mesh)
    note(sharded)
    doubled: Any = pure_callback(lambda x: x * 2, x, sharded)
    assert [x.tolist()] * len(ranks) == SEEN and torch.equal(x * 2, doubled.full_tensor())
    with pytest.raises(RuntimeError, match=r"too big"):
        step(x + 10)


CASES: dict[str, Callable[[Mesh], None]] = {
    case.__name__: case
    for case in (
        gradients_of_uneven_shards, empty_shards, draws_in_program_order, several_results, local_implementations,
        closed_over_tensors, lists_of_tensors, reshapes_of_shards, kernels_that_read_strides, training_steps,
        redistributions, free_results, gradients_from_outside, operators_outside_jit, a_stock_encoder,
        sums_in_another_dtype, gradients_of_moves, printing, host_calls, buckets,
        buckets_of_exchanges, a_stock_resnet,
    )
}  # fmt: skip


def run(name: str, mesh: Mesh) -> None:
    """Run a case."""
    CASES[name](mesh)
