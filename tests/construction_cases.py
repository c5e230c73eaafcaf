"""What the ranks of tests/api/test_construction.py run: functions that workers import."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import spmd
from spmd import P
from spmd.api.values.dtensor import local_parts
from spmd.collectives.resharding import redistribution
from spmd.collectives.transport import exchange
from spmd.core.pytree import tree_leaves
from spmd.job import failure_detector

LAYERS, WIDTH = 16, 2048
"""A model of 256 MiB: one matrix a layer."""


def peak_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """The most resident bytes during a call, beside those before it, and what it returns; Linux only."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier cases freed counts no more
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _memory("VmRSS")
    result = call()
    return _memory("VmHWM") - before, result


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def shard_bytes(tree: Any) -> int:
    return sum(shard.nbytes for leaf in tree_leaves(tree) for shard in leaf.shards)


def model(device: str) -> torch.nn.Module:
    with torch.device(device):
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers).requires_grad_(False)


SPECS = {"rows": P("data"), "columns": P(None, ("model", "data")), "one axis": P("model"), "replicated": P()}


def memory_of_distribute(name: str) -> tuple[int, int]:
    """The peak beside what was there before, and the bytes of the shards, of `distribute(tree, src_rank=0)`."""
    mesh, spec = spmd.make_mesh({"data": 2, "model": 2}), SPECS[name]
    is_source = spmd.process_index() == 0
    spmd.distribute(torch.ones(4, 4), spec, mesh, src_rank=0)  # process groups
    tree = dict(model("cpu" if is_source else "meta").named_parameters())
    peak, placed = peak_of(lambda: spmd.distribute(tree, spec, mesh, src_rank=0))
    return peak, shard_bytes(placed)


def specs_of(spec: P) -> Callable[..., Any]:
    return lambda name, module, mesh: {"weight": spec} if isinstance(module, torch.nn.Linear) else None


def memory_of_distribute_module(name: str, how: str) -> tuple[int, int]:
    """As `memory_of_distribute`, of a module: whose tensors all ranks have, or one rank that sends them, or nobody."""
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: a tensor that is freed is given back at once
    mesh, spec = spmd.make_mesh({"data": 2, "model": 2}), SPECS[name]
    spmd.distribute_module(torch.nn.Linear(4, 4), mesh, specs_of(spec), src_rank=0)  # process groups
    if how == "made":
        given, src_rank = model("meta"), None

        def partition(path: str, module: torch.nn.Module, mesh: spmd.Mesh) -> None:
            for key, value in module.named_parameters(recurse=False):
                setattr(module, key, torch.nn.Parameter(spmd.zeros_like(value, spec=spec, mesh=mesh), False))
    else:
        is_meta, src_rank = how == "sent" and spmd.process_index() > 0, 0 if how == "sent" else None
        given, partition = model("meta" if is_meta else "cpu"), specs_of(spec)
        with torch.no_grad():
            for value in given.parameters() if not is_meta else ():
                value.fill_(1.0)  # the memory is there
    peak, placed = peak_of(lambda: spmd.distribute_module(given, mesh, partition, src_rank=src_rank))
    expected = 0.0 if how == "made" else 1.0
    assert all(bool((value.to_local() == expected).all()) for value in placed.parameters())
    return peak, shard_bytes(dict(placed.named_parameters()))


def memory_of_factory(name: str) -> tuple[int, int]:
    mesh = spmd.make_mesh({"data": 2, "model": 2})
    peak, made = peak_of(lambda: spmd.ones(LAYERS * WIDTH, WIDTH, spec=SPECS[name], mesh=mesh))
    return peak, shard_bytes([made])


def parts_of(x: Any, gradient: Any) -> tuple[torch.Tensor, ...]:
    """The shards of this process's ranks, through which gradients flow; on processes by `to_local`."""
    if len(x.shards) == 1:
        return (x.to_local(grad_placements=gradient.pspec),)
    return local_parts(x, gradient)


def there_and_back(spec: P, rows: int, mesh: spmd.Mesh) -> None:
    """Local tensors to a DTensor, an operator on it, and back to local tensors: gradients are those of one device."""
    whole = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    placed = spmd.distribute(whole, spec, mesh)
    leaves = [shard.clone().requires_grad_() for shard in placed.shards]
    x = spmd.DTensor.from_local([leaf * 3 for leaf in leaves], mesh, spec, shape=(rows, 4))
    y = x * whole.sum()
    assert torch.allclose(3 * whole * whole.sum(), y.detach().full_tensor())
    found = y.spec.complete
    sum((part * part).sum() for part in parts_of(y.redistribute(found.pspec), found)).backward()
    gradient = 2 * 3 * whole * whole.sum() * whole.sum() * 3
    for leaf, coordinate in zip(leaves, mesh.held_coordinates, strict=True):
        expected = gradient[x.spec.local_slices(coordinate)]
        assert leaf.grad is not None and torch.allclose(expected, leaf.grad), spec


def partial_gradients(axes: dict[str, int], spec: P, axis: str | None) -> None:
    """Each rank multiplies its replica by its index along an axis: the gradient is the sum of what they multiply by."""
    mesh = spmd.make_mesh(axes)
    x = spmd.ones(5, 4, spec=spec, mesh=mesh, requires_grad=True)
    index = mesh.held_coordinates[0][mesh.axis_position(axis)] if axis else 0
    gradient = P(*spec.dims, partial={axis: "sum"}) if axis else None
    (x * 3).to_local(grad_placements=gradient).mul(index + 1).sum().backward()
    assert torch.equal(torch.full((5, 4), 9.0 if axis else 3.0), x.grad.full_tensor())
    assert x.grad.spec.complete == x.grad.spec


def gradients_of_whole(spec: P, mesh: spmd.Mesh) -> None:
    """All ranks compute from the whole: the same, or each a part of a sum."""
    whole = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for partial in ((), ("y",), ("x", "y")):
        x = spmd.distribute(whole, spec, mesh).requires_grad_()
        y = x.full_tensor(grad_placements=P(partial=dict.fromkeys(partial, "sum")))
        y.square().sum().backward()
        assert torch.allclose(2 * whole * mesh.axis_size(partial), x.grad.full_tensor())
        assert x.grad.spec == x.spec.complete


def gradients_of_what_is_distributed(spec: P, mesh: spmd.Mesh) -> None:
    """They reach the plain tensor of each process, or its part."""
    w = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (expected,) = torch.autograd.grad((w.exp() * w.exp()).sum(), w)
    y = spmd.distribute(w.exp(), spec, mesh)
    (found,) = torch.autograd.grad((y * y).sum(), w)
    assert torch.allclose(expected, found)
    if spec.partial:
        return
    part = w.detach()[y.spec.local_slices(mesh.held_coordinates[0])].requires_grad_()
    if len(mesh.held_coordinates) > 1:
        part = w.detach().requires_grad_()
    joined = spmd.from_process_data(part.exp(), spec, mesh)
    assert torch.equal(y.detach().full_tensor(), joined.detach().full_tensor())
    (joined * joined).sum().backward()
    assert torch.allclose((2 * part.exp() ** 2).detach(), part.grad)


def gradients_on_one_process(mesh: spmd.Mesh) -> str:
    """The error where autograd has computed a tensor on one process only."""
    w = torch.ones(4, requires_grad=spmd.process_index() == 0)
    return error_of(spmd.distribute, w * 2, P("x"), mesh)


def error_of(function: Callable[..., Any], *args: Any, **keywords: Any) -> str:
    try:
        function(*args, **keywords)
    except spmd.SpmdError as error:
        return str(error)
    return ""


def refused_local_tensors() -> dict[str, str]:
    mesh, rank = spmd.make_mesh({"x": 2}), spmd.process_index()
    local, join = torch.ones(3), spmd.DTensor.from_local
    return {
        "dtype": error_of(join, local.to(torch.float64 if rank else torch.float32), mesh, P("x")),
        "shape": error_of(join, torch.ones(2, 3) if rank == 0 else torch.ones(1, 4), mesh, P("x"), shape=(4, 3)),
        "requires_grad": error_of(join, local.clone().requires_grad_(rank == 0), mesh, P("x")),
        "replicas": error_of(join, local + rank, mesh, P(), run_check=True),
        "unchecked": error_of(join, local + rank, mesh, P()),
    }


def in_flight(axes: dict[str, int]) -> bool:
    """Moves that are started and waited for later, with others between; whether each was in flight."""
    mesh, twin = spmd.make_mesh(axes), spmd.make_mesh(axes, runtime="virtual")
    whole, rank = torch.arange(35.0).view(5, 7), spmd.process_index()
    y = "y" if "y" in axes else None
    targets = [P(), P(None, "x"), P(None, ("x", y)) if y else P(None, "x"), P("x", y)]
    waited = []
    for source, target in itertools.product([P("x"), P("x", y), P(partial={"x": "sum"})], targets):
        x = spmd.distribute(whole, source, mesh).requires_grad_()
        expected = spmd.distribute(whole, target, twin).shards[rank]
        moves = [x.redistribute(target, async_op=True) for _ in range(3)]
        other = (x.detach() + 1).full_tensor()
        if source != target:
            waited += ["in flight" in repr(move) for move in moves if needs_ranks(x.spec, move.spec)]
            assert len(moves) == sum("in flight" in repr(move) or not needs_ranks(x.spec, move.spec) for move in moves)
        assert torch.equal(whole + 1, other)
        for move in reversed(moves):
            assert torch.equal(expected, move.shards[0]) and "in flight" not in repr(move)
        (moves[0] * 2).sum().backward()
        assert torch.equal(torch.full_like(whole, 2), x.grad.full_tensor())
    return bool(waited) and all(waited)


def needs_ranks(source: spmd.DTensorSpec, target: spmd.DTensorSpec) -> bool:
    return any(step.is_collective for step in redistribution(source, target))


def failing_in_flight() -> str:
    """The error of a rank that waits for a collective which torch fails."""
    mesh = spmd.make_mesh({"x": 2})
    x = spmd.distribute(torch.ones(4), P("x"), mesh)
    moved = x.redistribute(P(), async_op=True)
    moved.full_tensor()  # what is really there
    moved = x.redistribute(P(), async_op=True)
    wait = exchange.wait

    def fail(pending: torch.Tensor) -> torch.Tensor:
        wait(pending)
        raise RuntimeError("connection closed by peer")

    with mock.patch.object(exchange, "wait", fail), mock.patch.object(failure_detector, "current", lambda: None):
        fail.__code__ = fail.__code__.replace(co_filename=torch.__file__)  # as one of torch's own
        return error_of(lambda: moved.shards)


def _fail_on_one(path: str, module: torch.nn.Module, mesh: spmd.Mesh) -> None:
    if spmd.process_index() == 1:
        raise spmd.ShardingError("on rank 1")


def modules_on_processes() -> dict[str, str]:
    """Modules of equal values, of one rank's values, and of values that differ."""
    mesh, rank, call = spmd.make_mesh({"x": 2, "y": 2}), spmd.process_index(), spmd.distribute_module
    torch.manual_seed(0)
    plain = torch.nn.Linear(5, 6)
    equal = call(copy.deepcopy(plain), mesh, specs_of(P("x", "y")))
    given = copy.deepcopy(plain) if rank == 3 else torch.nn.Linear(5, 6, device="meta")
    sent = call(given, mesh, specs_of(P(("y", "x"))), src_rank=3)
    for module in (equal, sent):
        for expected, found in zip(plain.parameters(), module.parameters(), strict=True):
            assert torch.equal(expected, found.full_tensor()) and found.requires_grad
    for make, theirs in ((spmd.rand, torch.rand), (spmd.randn, torch.randn)):
        torch.manual_seed(5)
        drawn = make(5, 3, spec=P("y", "x"), mesh=mesh)
        torch.manual_seed(5)
        assert torch.equal(theirs(5, 3), drawn.full_tensor())
    torch.manual_seed(5)
    keyed = spmd.randn(5, 3, spec=P("y", "x"), mesh=mesh, rng="counter")
    torch.manual_seed(5)
    expected = spmd.jit(lambda: torch.randn(5, 3), (), P(), mesh=mesh, rng="counter")()
    assert torch.equal(expected.full_tensor(), keyed.full_tensor())
    torch.manual_seed(rank)
    other = spmd.make_mesh({"z": 4})  # where nothing was drawn before
    seeds = error_of(lambda: spmd.randn(5, mesh=other, rng="counter"))
    torch.manual_seed(rank)
    different = torch.nn.Linear(5, 6)
    return {
        "seeds": seeds,
        "values": error_of(call, different, mesh),
        "failure": error_of(call, copy.deepcopy(plain), mesh, _fail_on_one),
    }
