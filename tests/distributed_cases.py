"""What the ranks of tests/collectives/test_distributed.py run: functions that workers import."""

from __future__ import annotations

import math
import os
import signal
import weakref
from typing import Any
from unittest import mock

import attrs
import optree
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor import placement_types as theirs_placements

import gpt
import layouts
import training
from spmd.api.jit import jit
from spmd.api.values.distribute import distribute, from_process_data
from spmd.api.values.dtensor import DTensor
from spmd.api.values.interop import from_torch_dtensor, to_torch_dtensor
from spmd.collectives.distributed import scatter
from spmd.core.mesh import Mesh, Runtime, make_mesh
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.errors import SpmdError
from spmd.job.process import init, process_count, process_index
from spmd.optim import apply_updates
from spmd.runtime.redistribute import redistribute_shards
from spmd.testing.executed import Executed, ExecutedCollectives
from spmd.testing.specs import every_spec, random_shards

CONFIG = gpt.Config(vocab=64, width=32, layers=1, heads=8, context=16)


def twins(axes: dict[str, int]) -> tuple[Mesh, Mesh]:
    """A distributed mesh, and a virtual one that says what must come out."""
    return make_mesh(axes, runtime="distributed"), make_mesh(axes, runtime="virtual")


def on(mesh: Mesh, spec: DTensorSpec) -> DTensorSpec:
    return DTensorSpec(mesh, spec.dims, spec.partial, spec.meta)


def error_of(function: Any, *args: Any, **keywords: Any) -> str:
    """The message of the error that a call must raise."""
    try:
        function(*args, **keywords)
    except SpmdError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{function} raised nothing")


def check_redistribution(mesh: Mesh, source: DTensorSpec, target: DTensorSpec, shards: Any) -> None:
    rank = mesh.rank(mesh.held_coordinates[0])
    expected = redistribute_shards(shards, source, target)[rank]
    (found,) = redistribute_shards([shards[rank]], on(mesh, source), on(mesh, target))
    assert torch.equal(expected, found), f"{source} -> {target}: {expected} {found}"
    assert expected.dtype == found.dtype and found.is_contiguous()


def redistribute_all_pairs(axes: dict[str, int], shape: tuple[int, ...]) -> int:
    mesh, virtual = twins(axes)
    generator = torch.Generator().manual_seed(0)
    specs = every_spec(virtual, TensorMeta(shape, torch.float32))
    for source in specs:
        for target in specs:
            check_redistribution(mesh, source, target, random_shards(source, generator)[0])
    return len(specs) ** 2


def scatter_sums(axes: dict[str, int], length: int, dtype: torch.dtype) -> None:
    """Terms that a sum in another order would round to another number."""
    mesh, virtual = twins(axes)
    meta, generator = TensorMeta((3, length), dtype), torch.Generator().manual_seed(0)
    partial = P(partial=dict.fromkeys(axes, "sum"))
    shards = [torch.randn(meta.shape, generator=generator).to(dtype) for _ in range(virtual.size)]
    for target in (P(tuple(axes)), P(None, tuple(axes)), P(None, tuple(reversed(axes)))):
        specs = (DTensorSpec.make(virtual, spec, meta) for spec in (partial, target))
        check_redistribution(mesh, *specs, shards)


def redistribute_strided(dtype: torch.dtype) -> None:
    """Shards of a length of one element in every other place of memory."""
    mesh, virtual = twins({"x": 2})
    found = every_spec(virtual, TensorMeta((4, 3), torch.float32))
    specs = [DTensorSpec(virtual, spec.dims, (), TensorMeta((4, 3), dtype)) for spec in found if not spec.partial]
    for source in specs:
        shards = random_shards(source, torch.Generator().manual_seed(0))[0]
        for strided in (
            [torch.stack([shard] * 2, -1)[..., 1] for shard in shards],
            [shard.T.clone().T for shard in shards],
        ):
            for target in specs:
                if target != source:
                    check_redistribution(mesh, source, target, strided)


def redistribute_one(axes: dict[str, int], source: DTensorSpec, target: DTensorSpec, shards: Any) -> None:
    check_redistribution(make_mesh(axes, runtime="distributed"), source, target, shards)


def train(
    name: str, axes: dict[str, int], runtime: str, steps: int, device: str = "cpu", scan: bool = False
) -> tuple[list[float], list[Any], list[Any], int]:
    """Losses of a strategy's steps; the collectives of the plan, those of a step, and the local bytes of parameters."""
    mesh = make_mesh(axes, runtime=runtime, device=device)
    config = attrs.evolve(CONFIG, scan=True, layers=3) if scan else CONFIG
    setup = training.Training(config, layouts.STRATEGIES[name], mesh)
    state, step = setup.init(), setup.step()
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        batch = tuple(torch.randint(CONFIG.vocab, (8, CONFIG.context), generator=generator) for _ in range(2))
        with ExecutedCollectives() as executed:
            state, loss = step(state, batch)
        losses.append(loss.item())
    planned = Executed.of_plan(step.plan(state, batch).comms, mesh)
    local = sum(shard.nbytes for leaf in optree.tree_leaves(state.params) for shard in leaf.shards)
    return losses, planned, executed.found, local


def values(*shape: int) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).view(shape)


def hold_one_shard() -> None:
    mesh, virtual = twins({"x": 2, "y": 2})
    whole, rank = values(5, 3), process_index()
    for spec in (P("x", "y"), P(("y", "x")), P(), P(None, "y", partial={"x": "sum"}), P(partial={"x": "max"})):
        placed, expected = distribute(whole, spec, mesh), distribute(whole, spec, virtual)
        assert torch.equal(expected.shards[rank], placed.to_local()) and len(placed.shards) == 1
        full = placed.full_tensor()
        assert torch.equal(whole, full) and type(full) is torch.Tensor
        full.zero_()
        assert torch.equal(expected.shards[rank], placed.to_local()), "full_tensor gave a shard away"
        moved = placed.redistribute(P("y"))
        assert torch.equal(distribute(whole, P("y"), virtual).shards[rank], moved.to_local())
    again = DTensor.from_local(distribute(whole, P("x"), mesh).to_local(), mesh, P("x"))
    assert again.shape == (5, 3) and torch.equal(whole, again.full_tensor())
    assert distribute(torch.tensor(2.5), P(), mesh).item() == 2.5
    shape = "[3,2]" if rank == 0 else "[3,1]" if rank == 1 else "[2,2]" if rank == 2 else "[2,1]"
    assert f"DTensor(f32[5,3] P('x', 'y') on Mesh(x=2, y=2), shards {shape})" == repr(
        distribute(whole, P("x", "y"), mesh)
    )


def take_the_tensors_of_one_rank(source: int) -> None:
    mesh = make_mesh({"x": 4}, runtime="distributed")
    kinds = (torch.float32, torch.bool, torch.int16, torch.complex64)
    truth = {str(kind): torch.tensor([[0, 1, 1], [1, 0, 1]]).to(kind) for kind in kinds}
    mine = (
        truth if process_index() == source else {name: torch.empty_like(x, device="meta") for name, x in truth.items()}
    )
    placed = distribute(mine, P("x"), mesh, src_rank=source)
    for name, expected in truth.items():
        assert torch.equal(expected, placed[name].full_tensor()), name


def scatter_every_spec(axes: dict[str, int], shape: tuple[int, ...], source: int) -> int:
    """Each rank has the shard that `distribute` makes of the whole tensor, for every spec; in many small pieces."""
    mesh, virtual = twins(axes)
    whole, rank = values(*shape), process_index()
    mine = whole.t().contiguous().t() if rank == source else whole.to("meta")
    targets = every_spec(virtual, TensorMeta.of(whole))
    for bytes_at_once in (16, 64, scatter.BUCKET):
        with mock.patch.object(scatter, "BUCKET", bytes_at_once):
            for target in targets:
                placed = distribute(mine, target.pspec, mesh, src_rank=source)
                expected = distribute(whole, target.pspec, virtual).shards[rank]
                assert torch.equal(expected, placed.to_local()) and placed.to_local().is_contiguous(), target
    return len(targets)


def load_parts() -> None:
    mesh = make_mesh({"data": 2, "model": 2}, runtime="distributed")
    whole, data = values(7, 2), mesh.held_coordinates[0][0]
    batch = {"x": whole.chunk(2)[data], "y": whole.long().chunk(2)[data]}
    placed = from_process_data(batch, P("data"), mesh)
    assert torch.equal(whole, placed["x"].full_tensor()) and torch.equal(whole.long(), placed["y"].full_tensor())


def errors_of_tensors() -> dict[str, str]:
    """Messages of errors that all ranks must raise, although not all of them do something wrong."""
    mesh, rank = make_mesh({"x": 4}, runtime="distributed"), process_index()
    odd = torch.full((4,), float(rank == 2))
    ragged = torch.zeros(3 if rank == 1 else 2)
    typed = torch.zeros(2, dtype=torch.int64 if rank == 3 else torch.float32)
    meta = torch.zeros(4, device="meta")
    other = make_mesh({"x": 2, "y": 2}, runtime="distributed")
    doubled = jit(lambda x: x * 2, P("x"), P("x"), mesh=mesh)
    return {
        "distribute": error_of(distribute, {"w": odd}, P("x"), mesh),
        "argument": error_of(doubled, odd),
        "shape": error_of(distribute, {"w": torch.zeros(4 + (rank == 1))}, P("x"), mesh),
        "src_rank": error_of(distribute, odd, P("x"), mesh, src_rank=4),
        "no data": error_of(distribute, meta, P("x"), mesh, src_rank=1),
        "meta": error_of(distribute, meta, P("x"), mesh),
        "from_local": error_of(DTensor.from_local, ragged, mesh, P("x")),
        "dtype": error_of(DTensor.from_local, typed, mesh, P("x")),
        "parts": error_of(from_process_data, {"w": ragged}, P("x"), mesh),
        "meta part": error_of(from_process_data, {"x": meta}, P("x"), mesh),
        "mesh": error_of(doubled, distribute(odd.zero_(), P("x"), other)),
        "size": error_of(make_mesh, {"x": 3}, runtime="distributed"),
        "abstract": error_of(distribute, odd, P("x"), make_mesh({"x": 4}, runtime="abstract")),
        "init": error_of(init, timeout=5),
    }


def errors_of_programs() -> dict[str, str]:
    mesh, rank = make_mesh({"x": 4}, runtime="distributed"), process_index()
    x = distribute(torch.ones(8), P("x"), mesh)
    function = torch.sin if rank == 1 else torch.cos
    found = {"function": error_of(jit(lambda x: function(x), P("x"), P("x"), mesh=mesh), x)}
    torch.manual_seed(rank // 2)
    found["seed"] = error_of(jit(lambda x: x + torch.rand(8), P("x"), P("x"), mesh=mesh), x)
    return found


def run_program(name: str, axes: dict[str, int]) -> None:
    """A small program, the second time that it runs, against the same on virtual ranks."""
    function, arguments, in_specs, out_specs = PROGRAMS[name]
    found = []
    for mesh in twins(axes):
        torch.manual_seed(0)
        step = jit(function, in_specs, out_specs, mesh=mesh)
        step(*arguments)
        found.append(optree.tree_leaves(step(*arguments)))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine.to_local(), expected.shards[process_index()], rtol=1e-6, atol=0, equal_nan=True)


def _with_max(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 0).amax(1)


PROGRAMS: dict[str, Any] = {
    "uneven": (lambda x, w: (x @ w).relu().sum(0), (values(7, 6), values(6, 5)), (P("x"), P(None, "x")), P("x")),
    "maximum of NaN": (_with_max, (values(6, 4).masked_fill(values(6, 4) == 5, math.nan),), P("x"), P()),
    "draw": (lambda x: x * torch.rand(6, 4), (values(6, 4),), P("x"), P(None, "x")),
    "dropout": (lambda x: torch.nn.functional.dropout(x, 0.5), (values(6, 4),), P("x"), P("x")),
    "offsets": (lambda x: (x.argmax(0), torch.cumsum(x, 0)), (values(6, 4),), P("x"), (P(), P("x"))),
    "halo": (lambda x: x.unfold(0, 3, 1).sum(-1), (values(9, 4),), P("x"), P("x")),
    "no arguments": (lambda: torch.arange(6) * 2, (), (), P("x")),
    "bool": (lambda x: ((x > 3).any(0), (x > 3).all()), (values(6, 4),), P("x"), (P(), P())),
}


def donate() -> None:
    """A donated shard is freed while the program runs."""
    mesh = make_mesh({"x": 2}, runtime="distributed")
    step = jit(lambda x: (x[None] + 1).view(-1), P("x"), P("x"), mesh=mesh, donate_argnums=0)
    x = distribute(values(4), P("x"), mesh)
    for _ in range(2):
        alive = weakref.ref(x.to_local())
        x = step(x)
        assert alive() is None
    assert torch.equal(values(4) + 2, x.full_tensor())


def write_in_place() -> None:
    """A donated shard is written in place, unless someone else holds its memory."""
    mesh = make_mesh({"x": process_count()}, runtime="distributed")
    step = jit(lambda x: x * 2, P("x"), P("x"), mesh=mesh, donate_argnums=0)
    x = distribute(values(4), P("x"), mesh)
    for _ in range(2):
        before = x.to_local().data_ptr()
        x = step(x)
        assert x.to_local().data_ptr() == before
    held, expected = x.to_local(), x.full_tensor()
    kept = held.clone()
    assert torch.equal(2 * expected, step(x).full_tensor())
    x = distribute(expected, P("x"), mesh)
    part = x.to_local()[1:]
    assert torch.equal(2 * expected, step(x).full_tensor())
    assert torch.equal(held, kept) and torch.equal(part, kept[1:])


def train_in_place(make: Any, *args: float) -> None:
    """Steps with donated state are those of one device: even, uneven and empty shards."""
    optimizer = make(*args)
    mesh = make_mesh({"x": process_count()}, runtime="distributed")
    params = {str(rows): values(rows, 2).sin() for rows in (4, 3, 1)}
    grads = {name: x.cos() for name, x in params.items()}
    expected = params, optimizer.init(params)
    specs = optree.tree_map(lambda x: P("x") if x.ndim else P(), expected)

    def by_updates(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads=grads, state=state, params=params)
        return apply_updates(params, updates), state

    started = expected
    for function in (optimizer.step, by_updates):
        step = jit(function, (*specs, P("x")), specs, mesh=mesh, donate_argnums=(0, 1))
        assert "fused" in step.lower(*started, grads).as_text()
        state, slopes, expected = distribute(started, specs, mesh), distribute(grads, P("x"), mesh), started
        for _ in range(3):
            state, expected = step(*state, slopes), optimizer.step(*expected, grads)
        for mine, theirs in zip(optree.tree_leaves(state), optree.tree_leaves(expected), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)


def total_of_ranks(factor: float) -> float:
    mesh = make_mesh({"x": process_count()})
    assert mesh.runtime is Runtime.DISTRIBUTED
    part = DTensor.from_local(torch.tensor([factor * process_index()]), mesh, P("x"))
    return jit(lambda x: x.sum(), P("x"), P(), mesh=mesh)(part).item()


def fail_on_rank_one() -> None:
    mesh = make_mesh({"x": process_count()})
    if process_index() == 1:
        raise ValueError("what rank 1 could not do")
    distribute(torch.ones(2), P("x"), mesh)


def convert() -> list[str]:
    """To torch's DTensor and back; the errors of what cannot be converted."""
    mesh, whole = make_mesh({"x": 2, "y": 2}, runtime="distributed"), values(5, 3)
    for spec in (P("x", "y"), P(("x", "y")), P(), P(None, "y", partial={"x": "sum"}), P(partial={"x": "max"})):
        ours = distribute(whole, spec, mesh)
        theirs = to_torch_dtensor(ours)
        assert torch.equal(whole, theirs.full_tensor()), spec
        again = from_torch_dtensor(theirs)
        assert ours.spec == again.spec and again.to_local() is not None
        assert again.to_local().data_ptr() == ours.to_local().data_ptr()
    flat = init_device_mesh("cpu", (4,))
    taken = from_torch_dtensor(distribute_tensor(whole, flat, [theirs_placements.Shard(0)]))
    assert "P('dim_0') on Mesh(dim_0=4)" in repr(taken) and torch.equal(whole, taken.full_tensor())
    average = TorchDTensor.from_local(whole, flat, [theirs_placements.Partial("avg")])
    return [
        error_of(to_torch_dtensor, distribute(whole, P(("y", "x")), mesh)),
        error_of(to_torch_dtensor, distribute(whole, P("x"), make_mesh({"x": 2}, runtime="virtual"))),
        error_of(from_torch_dtensor, average),
    ]


def die_on_rank_one() -> None:
    mesh = make_mesh({"x": process_count()})
    if process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distribute(torch.ones(2), P("x"), mesh)


def send_to_itself(device: str) -> str:
    """Every collective in a group of this one rank, by the backend of the device, whose name is returned."""
    mesh = make_mesh({"x": 1}, runtime="distributed", device=device)
    x, group = values(4, 2).to(mesh.device).view(-1), dist.group.WORLD
    calls = torch.ops._c10d_functional
    scattered, broadcast = torch.empty_like(x), x.clone()
    dist.scatter(scattered, [x], 0)
    dist.broadcast(broadcast, 0)
    pending = [
        calls.all_reduce(x, "sum", group.group_name),
        calls.all_gather_into_tensor_out(x, 1, group.group_name, out=torch.empty_like(x)),
        calls.reduce_scatter_tensor(x, "sum", 1, group.group_name),
        calls.all_to_all_single(x, [8], [8], group.group_name),
        scattered,
        broadcast,
    ]
    for received in pending:
        assert torch.equal(x, calls.wait_tensor(received))
    return group._get_backend(mesh.device).name()
