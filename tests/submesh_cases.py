"""What the ranks of tests/runtime/test_submeshes.py run: programs on some of the processes of a job of four."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import placement_types as theirs_placements

import spmd
from spmd import P
from spmd.collectives.transport import process_groups
from spmd.core.mesh import Mesh, make_mesh
from spmd.job import checks

X = torch.arange(10.0)


def halves() -> tuple[Mesh, Mesh]:
    """Two meshes side by side; the ranks of the second are not in the order of the processes."""
    return tuple(make_mesh({"x": 2}, runtime="distributed", ranks=ranks) for ranks in (range(2), (3, 2)))  # type: ignore[return-value]


def mine() -> Mesh:
    return next(mesh for mesh in halves() if spmd.process_index() in mesh.ranks)


def whole() -> Mesh:
    return make_mesh({"data": 2, "model": 2}, runtime="distributed")


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except spmd.SpmdError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def square(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def run_side_by_side() -> str:
    """Other programs on each half, more on one of them, then programs on all; what the ranks of a half print."""
    first, second = halves()
    printed = io.StringIO()
    if spmd.process_index() in first.ranks:
        step = spmd.jit(torch.func.grad(square), P("x"), P("x"), mesh=first)
        for _ in range(3):
            assert torch.equal(2 * X, step(X).full_tensor())
        grid = make_mesh({"a": 2, "b": 1}, runtime="distributed", ranks=(0, 1))
        assert torch.equal(X.cumsum(0), spmd.jit(lambda x: x.cumsum(0), P("a"), P(), mesh=grid)(X).full_tensor())
    else:
        x = spmd.distribute(X if spmd.process_index() == 2 else X.to("meta"), P("x"), second, src_rank=1)
        assert torch.equal(X[5:] if spmd.process_index() == 2 else X[:5], x.to_local())
        assert torch.equal(X, x.redistribute(P()).to_local())
        assert torch.equal(
            X.view(2, 5).flip(0).flatten(), spmd.shard_map(swap, second, P("x"), P("x"))(x).full_tensor()
        )
        joined = spmd.from_process_data(x.to_local(), P("x"), second)
        assert torch.equal(X, spmd.DTensor.from_local(joined.to_local(), second, P("x")).full_tensor())
        leaf = spmd.distribute(X, P("x"), second).requires_grad_()
        square(leaf).backward()
        assert torch.equal(2 * X, leaf.grad.full_tensor())
        with contextlib.redirect_stdout(printed):
            spmd.jit(show, P("x"), P("x"), mesh=second)(x)
    run_on_all()
    return printed.getvalue()


def swap(x: torch.Tensor) -> torch.Tensor:
    return spmd.collectives.ppermute(x, "x", [(0, 1), (1, 0)])


def show(x: torch.Tensor) -> torch.Tensor:
    spmd.debug.print("has {}", x)
    return x * 2


def run_on_all() -> None:
    """Programs on all processes, and on the rows and columns of their mesh."""
    mesh, me = whole(), spmd.process_index()
    assert square(X).item() == spmd.jit(square, P(("data", "model")), P(), mesh=mesh)(X).item()
    for axis, index in (("data", me % 2), ("model", me // 2)):
        part = mesh[axis]
        moved = X + index
        found = spmd.jit(torch.func.grad(square), P(axis), P(axis), mesh=part)(moved)
        assert torch.equal(2 * moved, found.full_tensor())
    turned = mesh["model", "data"]
    assert torch.equal(X, spmd.distribute(X, P("model"), turned).full_tensor())
    assert torch.equal(X, spmd.distribute(X, P("data"), mesh).full_tensor())


def slice_mesh() -> list[tuple[int, ...]]:
    mesh = whole()
    assert mesh["data", "model"] == mesh
    again = mesh["model"]
    assert (again, hash(again)) == (mesh["model"], hash(mesh["model"]))
    return [mesh[axes].ranks for axes in ("data", "model", ("data", "model"), ("model", "data"))]


def stay_outside() -> list[str]:
    """What a process says of calls on a mesh that it is not in; nothing in it waits for others."""
    mesh = halves()[0]
    if spmd.process_index() in mesh.ranks:
        return []
    step = spmd.jit(square, P("x"), P(), mesh=mesh)
    assert step.plan(X).comms[0].kind == "all_reduce" and "all_reduce" in step.lower(X).as_text()
    calls: list[Callable[[], object]] = [
        lambda: mesh.held_coordinates,
        lambda: mesh["x"],
        lambda: step(X),
        lambda: step.compile(X),
        lambda: spmd.distribute(X, P("x"), mesh),
        lambda: spmd.distribute(X, P("x"), mesh, src_rank=0),
        lambda: spmd.from_process_data(X, P("x"), mesh),
        lambda: spmd.DTensor.from_local(X, mesh, P("x")),
        lambda: spmd.shard_map(swap, mesh, P("x"), P("x"))(X),
        lambda: spmd.checkpoint.load("nowhere", {"w": P("x")}, mesh=mesh),
        lambda: spmd.Machine.measure(mesh),
        lambda: _uncompiled(step),
    ]
    return [error_of(call) for call in calls]


def _uncompiled(step: Any) -> None:
    with spmd.disable_jit():
        step(X)


def refuse_arguments() -> list[str]:
    def make(**options: Any) -> Callable[[], object]:
        return lambda: make_mesh({"x": 2}, **{"runtime": "distributed", **options})

    return [
        error_of(make(ranks=range(3))),
        error_of(make(ranks=(1, 1))),
        error_of(make(ranks=(0, 4))),
        error_of(make(ranks=(0, -1))),
        error_of(make(ranks=(0, 1.5))),
        error_of(make(ranks=range(2), runtime="virtual")),
        error_of(make(ranks=range(2), runtime="abstract")),
        error_of(make()),
        error_of(lambda: whole()["pipe"]),
    ]


def refuse_other_meshes() -> list[str]:
    """A DTensor of one mesh in a function of another, and a tree on meshes over other processes."""
    mesh = whole()
    part, x = mesh["model"], spmd.distribute(X, P("data"), mesh)
    return [
        error_of(lambda: spmd.jit(square, P("model"), P(), mesh=part)(x)),
        error_of(lambda: spmd.checkpoint.save([x, spmd.distribute(X, P("model"), part)], "nowhere")),
    ]


def save_and_load(folder: str) -> None:
    """Each half saves and loads at once, by other specs; then all processes load what a half has saved."""
    mesh, half = mine(), spmd.process_index() // 2
    tree = {"w": spmd.distribute(X + half, P("x"), mesh), "step": half, "at": spmd.checkpoint.Position.now(half)}
    for save in (spmd.checkpoint.save, lambda *args: spmd.checkpoint.save_async(*args).wait()):
        save(tree, f"{folder}/{half}")
        like = {"w": P(), "step": 0, "at": spmd.checkpoint.Position()}
        found = spmd.checkpoint.load(f"{folder}/{half}", like, mesh=mesh)
        assert (half, half) == (found["step"], found["at"].step) and torch.equal(X + half, found["w"].full_tensor())
    spmd.distribute(X, P(), whole())  # both have saved
    found = spmd.checkpoint.load(f"{folder}/1", {"w": P("data")}, mesh=whole())
    assert torch.equal(X + 1, found["w"].full_tensor())


def refuse_a_folder(folder: str) -> str:
    """A save on the second half whose path differs between its ranks."""
    mesh = mine()
    x, me = spmd.distribute(X, P("x"), mesh), spmd.process_index()
    return error_of(lambda: spmd.checkpoint.save([x], f"{folder}/{me}"))


@contextlib.contextmanager
def comparing_calls() -> Iterator[None]:
    held, checks.every_call = checks.every_call, True
    try:
        yield
    finally:
        checks.every_call = held


def part_in_a_half() -> list[str]:
    """The errors of a half whose ranks part; the other one goes on."""
    mesh, odd = mine(), spmd.process_index() % 2 == 1
    x = spmd.distribute(X, P("x"), mesh)
    step, other = (spmd.jit(f, P("x"), P(), mesh=mesh) for f in (square, torch.sum))
    step(x), other(x)
    if 0 in mesh.ranks:
        with comparing_calls():
            return [str(step(x).item()) for _ in range(9)]
    sines = spmd.jit(torch.sin if odd else torch.cos, P("x"), P("x"), mesh=mesh)
    found = [
        error_of(lambda: spmd.distribute(X + odd, P(), mesh)),
        error_of(lambda: spmd.from_process_data(X + odd, P(), mesh)),
        error_of(lambda: sines(x)),
        error_of(lambda: _failing(odd, mesh)),
    ]
    if odd:
        step._last._executable._history.add(0)  # as if this rank had run one program more
    found.append(error_of(x.full_tensor))
    with comparing_calls():
        found.append(error_of(lambda: (step if odd else other)(x)))
        with spmd.disable_jit():
            reduce = spmd.collectives.psum if odd else spmd.collectives.pmax
            found.append(error_of(lambda: spmd.shard_map(lambda x: reduce(x, "x"), mesh, P("x"), P())(X)))
    return found


def _failing(odd: bool, mesh: Mesh) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if odd:
            raise spmd.SpmdError("no such layer")
        return x

    spmd.jit(function, P("x"), P("x"), mesh=mesh)(X)


def convert() -> str:
    """Torch's DTensors on some of the processes, and back; the error of what cannot be converted."""
    mesh, me = whole()["model"], spmd.process_index()
    x = spmd.distribute(X, P("model"), mesh)
    theirs = spmd.to_torch_dtensor(x)
    assert theirs.device_mesh.mesh.flatten().tolist() == list(mesh.ranks)
    assert torch.equal(X, theirs.full_tensor()) and spmd.from_torch_dtensor(theirs).spec == x.spec
    given = DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("y",))
    taken = spmd.from_torch_dtensor(TorchDTensor.from_local(X[me : me + 1], given, [theirs_placements.Shard(0)]))
    assert taken.mesh.ranks == (3, 2, 1, 0) and torch.equal(X[:4].flip(0), taken.full_tensor())
    return error_of(lambda: spmd.to_torch_dtensor(taken))


def run_alone() -> int:
    """A mesh of one process of the job, without the others; the number of groups that it has made."""
    before = _groups()
    if spmd.process_index() == 2:
        mesh = make_mesh({"x": 1}, runtime="distributed", ranks=[2])
        x = spmd.distribute(X, P("x"), mesh)
        assert square(X).item() == spmd.jit(square, P("x"), P(), mesh=mesh)(x).item()
        assert torch.equal(X, x.full_tensor()) and torch.equal(X, spmd.from_process_data(X, P(), mesh).full_tensor())
        with comparing_calls():
            spmd.jit(show, P("x"), P("x"), mesh=mesh)(x)
    return _groups() - before


def _groups() -> int:
    return sum(map(len, process_groups._made.values()))


def measure() -> tuple[Any, Any]:
    """The machines of the halves, measured at once."""
    machine = spmd.Machine.measure(mine())
    return machine, machine.origin
