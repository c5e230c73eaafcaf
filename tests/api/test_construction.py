"""DTensors made: of one rank's tensors, of modules, by factories."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import construction_cases as cases
import pytest
import torch
from workers import Workers

import spmd
from spmd import P
from spmd.collectives.distributed import scatter
from spmd.errors import MeshError, ShardingError
from spmd.testing.live import largest_bytes, peak_beside

NOISE = 8 << 20
"""Resident bytes that are neither shards nor a bucket: what libraries allocate at first use."""

LINE = spmd.make_mesh({"x": 4}, runtime="virtual")
GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
SPECS = [P(), P("x"), P(None, "x"), P("x", "y"), P(("y", "x")), P("y", partial={"x": "sum"})]


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.SPECS)
def test_a_rank_holds_its_shards_and_a_bucket_while_one_rank_sends(workers: Workers, name: str) -> None:
    for peak, shards in workers.run(cases.memory_of_distribute, name, ranks=4):
        assert peak <= shards + scatter.BUCKET + NOISE


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sent", "equal", "made"])
@pytest.mark.parametrize("name", cases.SPECS)
def test_a_rank_holds_its_shards_and_a_bucket_while_a_module_is_distributed(
    workers: Workers, name: str, how: str
) -> None:
    for peak, shards in workers.run(cases.memory_of_distribute_module, name, how, ranks=4):
        assert peak <= shards + scatter.BUCKET + NOISE


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.SPECS)
def test_a_rank_holds_its_shard_of_what_a_factory_makes(workers: Workers, name: str) -> None:
    for peak, shards in workers.run(cases.memory_of_factory, name, ranks=4):
        assert peak <= shards + NOISE


FACTORIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "zeros": (spmd.zeros, torch.zeros),
    "ones": (spmd.ones, torch.ones),
    "full": (
        lambda *size, **given: spmd.full(size, 2.5, **given),
        lambda *size, **given: torch.full(size, 2.5, **given),
    ),
    "rand": (spmd.rand, torch.rand),
    "randn": (spmd.randn, torch.randn),
}


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("name", FACTORIES)
def test_factories_make_the_values_of_one_device(name: str, spec: P) -> None:
    ours, theirs = FACTORIES[name]
    for shape, dtype in itertools.product([(4, 8), (5, 3), (1, 2), (0, 3)], [None, torch.float64]):
        torch.manual_seed(7)
        made = ours(*shape, spec=spec, mesh=GRID, dtype=dtype, requires_grad=True)
        torch.manual_seed(7)
        expected = theirs(*shape, dtype=dtype)
        assert made.spec.pspec == spec and made.requires_grad and made.is_leaf and made.dtype == expected.dtype
        assert torch.equal(expected, made.detach().full_tensor())
        for coordinate, shard in zip(GRID.coordinates(), made.shards, strict=True):
            assert made.spec.local_shape(coordinate) == shard.shape


@pytest.mark.parametrize("name", ["rand", "randn"])
def test_factories_draw_their_shards_by_keys(name: str) -> None:
    """The numbers are those of a function with this draw on any mesh, and nothing is sent."""
    ours, theirs = FACTORIES[name]
    one = spmd.make_mesh({"x": 1}, runtime="virtual")
    for shape, dtype in itertools.product([(4, 8), (5, 3), (1, 2), (0, 3)], [None, torch.complex64, torch.bfloat16]):
        torch.manual_seed(7)
        draw = spmd.jit(lambda t=theirs, s=shape, d=dtype: t(*s, dtype=d), (), P(), mesh=one, rng="counter")
        expected, after = draw().full_tensor(), torch.get_rng_state()
        for spec in SPECS:
            torch.manual_seed(7)
            with spmd.comms_of(error=True):
                made = ours(*shape, spec=spec, mesh=GRID, dtype=dtype, requires_grad=True, rng="counter")
            assert made.spec.pspec == spec and made.requires_grad and made.is_leaf
            assert torch.equal(expected, made.detach().full_tensor()) and torch.equal(after, torch.get_rng_state())
        torch.manual_seed(7)
        like = getattr(spmd, f"{name}_like")(made, spec=P("y"), rng="counter")
        assert P("y") == like.spec.pspec and torch.equal(expected, like.full_tensor())


@pytest.mark.parametrize("rng", ["torch", "counter"])
def test_a_factory_in_jit_draws_as_it_says(rng: str) -> None:
    def draw(x: Any) -> Any:
        return torch.rand(2), spmd.randn(4, 6, spec=P("x"), rng="counter") + x

    found = []
    for mesh in (LINE, GRID):
        jitted = spmd.jit(draw, P("x"), (P(), P("x")), mesh=mesh, rng=rng)
        torch.manual_seed(1)
        found.append([y.full_tensor() for y in jitted(torch.zeros(4, 6))])
        assert "draw(" in jitted.lower(torch.zeros(4, 6)).as_text()
    assert all(map(torch.equal, *found))


RANGES = [(10,), (2, 10), (2, 10, 3), (10, 2, -3), (0.0, 1.0, 0.1), (3.5,), (0,), (1, 2**40, 2**36)]


@pytest.mark.parametrize("args", RANGES, ids=repr)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.int32])
def test_ranges(args: tuple[float, ...], dtype: torch.dtype | None) -> None:
    if dtype is torch.int32 and (args[0] != int(args[0]) or args[-1] in (0.1, 2**36)):
        return
    expected = torch.arange(*args, dtype=dtype)
    for spec in (P(), P("x"), P(("y", "x")), P(partial={"y": "sum"})):
        made = spmd.arange(*args, spec=spec, mesh=GRID, dtype=dtype)
        torch.testing.assert_close(made.full_tensor(), expected, rtol=0 if 0.1 not in args else 1e-7, atol=0)


@pytest.mark.parametrize("name", ["zeros", "ones", "empty", "full", "arange", "randn"])
@pytest.mark.parametrize("spec", [P("x"), P(("x", "y"))], ids=repr)
def test_no_rank_holds_the_whole(name: str, spec: P) -> None:
    by_keys = functools.partial(spmd.randn, rng="counter")
    make = {"full": lambda n, **given: spmd.full((n,), 3.0, **given), "randn": by_keys}.get(name) or getattr(spmd, name)
    most = largest_bytes(lambda: make(1 << 12, spec=spec, mesh=GRID, dtype=torch.float64))
    assert most == 8 * (1 << 12) // GRID.axis_size([axis for axes in spec.dims for axis in axes])


def test_shapes_as_torch_takes_them() -> None:
    for size in ((8, 4), ((8, 4),), ([8, 4],), (torch.Size((8, 4)),)):
        assert (8, 4) == spmd.zeros(*size, mesh=LINE).shape == spmd.empty(*size, mesh=LINE).shape
    assert () == spmd.ones((), mesh=LINE).shape == spmd.zeros([], mesh=LINE).shape
    assert torch.int64 == spmd.full(3, 2, mesh=LINE).dtype
    assert torch.complex64 == spmd.full((3,), 1j, mesh=LINE).dtype
    with spmd.use_mesh(LINE):
        assert P("x") == spmd.zeros(3, spec=[spmd.Shard(0)]).spec.pspec


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: spmd.zeros(mesh=LINE), ShardingError, r"spmd.zeros takes a shape, as zeros\(8, 4\)"),
        (lambda: spmd.ones(2.5, mesh=LINE), ShardingError, "spmd.ones takes a shape"),
        (lambda: spmd.empty(-1, mesh=LINE), ShardingError, "spmd.empty takes a shape"),
        (lambda: spmd.zeros(3, spec=P(None, "x"), mesh=LINE), ShardingError, "spmd.zeros: .*names 2 dims"),
        (lambda: spmd.zeros(3), MeshError, "No mesh was given"),
        (lambda: spmd.zeros(3, mesh=spmd.make_mesh({"x": 2}, runtime="abstract")), MeshError, "holds no data"),
        (lambda: spmd.rand(3, mesh=LINE, rng="keys"), ShardingError, "rng of spmd.rand must be 'torch' or 'counter'"),
        (lambda: spmd.zeros_like(3, mesh=LINE), ShardingError, "the tensor is no tensor"),
    ],
)
def test_what_factories_refuse(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


LIKE: dict[str, tuple[Any, ...]] = {
    "zeros_like": (), "ones_like": (), "empty_like": (), "full_like": (3,), "rand_like": (), "randn_like": (),
}  # fmt: skip


@pytest.mark.parametrize("name", LIKE)
def test_like_another_tensor(name: str) -> None:
    make, rest = getattr(spmd, name), LIKE[name]
    x = spmd.distribute(torch.ones(5, 4, dtype=torch.float64), P("x"), GRID)
    theirs = getattr(torch, name)(x, *rest)  # torch's own keep the spec, too
    assert x.spec == theirs.spec == make(x, *rest).spec
    assert P(None, "y") == make(x, *rest, spec=P(None, "y")).spec.pspec
    for plain in (x.full_tensor(), torch.empty(5, 4, device="meta"), x.spec.meta):
        made = make(plain, *rest, spec=P("y"), mesh=GRID, dtype=torch.float32, requires_grad=True)
        assert (P("y"), torch.float32, True) == (made.spec.pspec, made.dtype, made.requires_grad)
    if name != "empty_like":
        torch.manual_seed(1)
        expected = getattr(torch, name)(torch.empty(5, 4, dtype=torch.float64), *rest)
        torch.manual_seed(1)
        assert torch.equal(expected, make(x, *rest).full_tensor())


def test_factories_inside_of_jit_are_values_with_this_sharding() -> None:
    def function(x: Any) -> Any:
        made = spmd.ones(4, 2, spec=P(None, "x")) + spmd.arange(2) + spmd.zeros_like(x, spec=P("x"))
        return x + made + 0 * spmd.rand(4, 2, spec=P("x"))

    x = torch.randn(4, 2)
    found = spmd.jit(function, P("x"), P(), mesh=LINE)(x)
    torch.testing.assert_close(found.full_tensor(), x + 1 + torch.arange(2))


class Tied(torch.nn.Module):
    """An embedding with a head that shares its weight, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(6)
        self.norm.bias.requires_grad_(False)

    def forward(self, index: Any) -> Any:
        return self.norm(self.head(self.embed(index)))


def by_specs(path: str, module: torch.nn.Module, mesh: spmd.Mesh) -> Any:
    return {"embed": {"weight": P("x")}, "head": {"bias": P("y")}, "norm": {"running_mean": P("x")}}.get(path)


def by_hand(path: str, module: torch.nn.Module, mesh: spmd.Mesh) -> None:
    if path == "embed":
        module.weight = torch.nn.Parameter(spmd.distribute(module.weight, P("x"), mesh))


PARTITIONS = {
    "replicated": None,
    "specs": by_specs,
    "by hand": by_hand,
    "fully sharded": spmd.fsdp_specs(Tied(), "x", min_size=20),
    "tensor parallel": {"head.weight": P("x"), "head.bias": P("x")},
    "both names": {"embed.weight": P("x"), "head.weight": P("x"), "norm.running_mean": P("y")},
}


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS.keys())
def test_a_distributed_module_is_the_module_of_one_device(partition: Any) -> None:
    plain, index = Tied(), torch.arange(12) % 6
    module = spmd.distribute_module(
        copy.deepcopy(plain),
        GRID,
        partition,
        input_fn=lambda module, inputs, mesh: (spmd.distribute(inputs[0], P("x"), mesh),),
        output_fn=lambda module, output, mesh: output.full_tensor(),
    )
    assert module.embed.weight is module.head.weight
    assert (P("x") if partition else P()) == module.head.weight.spec.pspec
    assert all(isinstance(value, spmd.DTensor) for value in module.state_dict().values())
    assert [value.requires_grad for value in plain.parameters()] == [x.requires_grad for x in module.parameters()]
    for each in (plain, module):
        each(index).square().sum().backward()
    for (name, expected), found in zip(plain.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(found.detach().full_tensor(), expected.detach(), msg=name)
        if expected.grad is not None:
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-5)
    for expected, found in zip(plain.buffers(), module.buffers(), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected)


def make_rows(path: str, module: torch.nn.Module, mesh: spmd.Mesh) -> None:
    for key, parameter in module.named_parameters(recurse=False):
        setattr(module, key, torch.nn.Parameter(spmd.empty_like(parameter, spec=P("x"), mesh=mesh)))


def test_a_module_on_the_meta_device_is_made_sharded_with_the_values_of_one_device() -> None:
    def network(device: str) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 6, device=device), torch.nn.Linear(6, 3, device=device))

    made = spmd.distribute_module(network("meta"), LINE, make_rows)
    for layers in (made, plain := network("cpu")):
        torch.manual_seed(3)
        for layer in layers:
            layer.reset_parameters()
    for expected, found in zip(plain.parameters(), made.parameters(), strict=True):
        assert torch.equal(expected, found.detach().full_tensor()) and P("x") == found.spec.pspec


def test_a_plain_tensor_goes_as_soon_as_its_shards_are_there() -> None:
    module = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(8)])
    mesh = spmd.make_mesh({"x": 1}, runtime="virtual")
    peak = peak_beside(lambda: spmd.distribute_module(module, mesh), lambda: list(module.parameters()))
    assert 4 * 64 * 64 == peak  # one of them


def tie_differently(path: str, module: torch.nn.Module, mesh: spmd.Mesh) -> Any:
    return {"embed": {"weight": P("x")}, "head": {"weight": P(None, "x")}}.get(path)


MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (
        lambda: spmd.distribute_module(torch.nn.Linear(2, 2, device="meta"), LINE),
        "weight is on the meta device",
    ),
    "meta with specs": (
        lambda: spmd.distribute_module(torch.nn.Linear(2, 2, device="meta"), LINE, {"weight": P("x")}),
        r"weight is on the meta device .* spmd.materialize\(module, specs, mesh\) .* src_rank=0",
    ),
    "a dotted name": (
        lambda: spmd.distribute_module(Tied(), LINE, {"head.wieght": P()}),
        "There is a spec for 'head.wieght', which Tied lacks. It has",
    ),
    "two specs": (
        lambda: spmd.distribute_module(Tied(), LINE, {"embed.weight": P(), "head.weight": P("x")}),
        r"embed.weight and head.weight of Tied are tied: one tensor, with the specs P\(\) and P\('x'\)",
    ),
    "a returned spec": (
        lambda: spmd.distribute_module(Tied(), LINE, lambda *_: P("x")),
        r"partition_fn returned P P\('x'\) for the module, a Tied. Return a dict",
    ),
    "a returned module": (
        lambda: spmd.distribute_module(torch.nn.Linear(2, 2), LINE, lambda name, module, mesh: module),
        "partition_fn returned Linear",
    ),
    "a spec for all": (lambda: spmd.distribute_module(Tied(), LINE, P("x")), "or be a dict of specs by dotted names"),
    "a partition_fn": (
        lambda: spmd.distribute_module(Tied(), LINE, lambda path: None),
        "must take .name, module",
    ),
    "no module": (lambda: spmd.distribute_module({"w": torch.ones(2)}, LINE), "takes an nn.Module .got dict"),
    "lazy": (lambda: spmd.distribute_module(torch.nn.LazyLinear(2), LINE), "weight has no shape yet"),
    "twice": (
        lambda: spmd.distribute_module(spmd.distribute_module(torch.nn.Linear(2, 2), LINE), LINE),
        "Linear was distributed before",
    ),
    "a name": (
        lambda: spmd.distribute_module(torch.nn.Linear(2, 2), LINE, lambda *_: {"wieght": P()}),
        "partition_fn has a spec for 'wieght' of the module, a Linear, whose own tensors are weight, bias",
    ),
    "a spec": (lambda: spmd.distribute_module(torch.nn.Linear(2, 2), LINE, lambda *_: {"bias": P("w")}), "bias f32.2"),
    "tied": (lambda: spmd.distribute_module(Tied(), LINE, tie_differently), "embed.weight is tied: one tensor"),
    "two arguments": (
        lambda: spmd.distribute_module(torch.nn.Linear(2, 2), LINE, input_fn=lambda inputs, mesh: inputs),
        r"input_fn must take \(module, inputs, mesh\), but takes \(inputs, mesh\)",
    ),
    "output": (
        lambda: spmd.distribute_module(torch.nn.Linear(2, 2), LINE, output_fn=lambda outputs: outputs),
        r"output_fn must take \(module, outputs, mesh\)",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_are_refused(name: str) -> None:
    call, text = MODULES[name]
    with pytest.raises(ShardingError, match=text):
        call()


def test_modules_on_processes(workers: Workers) -> None:
    found = workers.run(cases.modules_on_processes, ranks=4)
    for rank, texts in enumerate(found):
        assert "weight differs between ranks" in texts["values"]
        assert "torch.manual_seed" in texts["seeds"]
        expected = "on rank 1" if rank == 1 else "Rank 1 failed in distribute_module of Linear on Mesh(x=2, y=2)"
        assert expected in texts["failure"]
