"""DTensors moved and made, where torch's DTensor has tests: `test_redistribute.py`, `test_api.py`, `test_init.py`."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import spmd
from spmd import DTensor, P, Partial, Replicate, Shard
from spmd.errors import MeshError, ShardingError

LINE = spmd.make_mesh({"x": 4}, runtime="virtual")
GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
CUBE = spmd.make_mesh({"x": 2, "y": 2, "z": 2}, runtime="virtual")
SHAPES = [(12, 3), (13, 3), (14, 3), (3, 12), (3, 13), (3, 2)]
DTYPES = [torch.float32, torch.complex64]
PENDING = P(partial={"x": "sum"})


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def moved(source: P, target: P, whole: torch.Tensor, mesh: spmd.Mesh = LINE) -> tuple[dict[str, int], dict[str, int]]:
    """Check a move and its gradient; the collectives of each."""
    x = spmd.distribute(whole, source, mesh).requires_grad_(whole.dtype.is_floating_point or whole.is_complex())
    with spmd.comms_of() as forward:
        y = x.redistribute(target)
    expected = spmd.distribute(whole, target, mesh)
    assert expected.spec == y.spec
    assert torch.equal(whole, y.detach().full_tensor())
    with spmd.comms_of() as backward:
        y.backward(spmd.ones_like(y.detach(), spec=y.spec.complete.pspec))
    assert x.spec.complete == x.grad.spec and torch.equal(torch.ones_like(whole), x.grad.full_tensor())
    return forward.count(), backward.count()


# test_redistribute.py


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
@pytest.mark.parametrize("dim", [0, 1])
def test_moves_along_one_axis_and_what_they_send(dim: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    shards, whole = P(*(None,) * dim, "x"), values(shape, dtype)
    assert ({"all_gather": 1}, {}) == moved(shards, P(), whole)
    assert ({}, {"all_gather": 1}) == moved(P(), shards, whole)
    assert ({}, {}) == moved(P(), P(), whole)
    assert ({"all_reduce": 1}, {}) == moved(PENDING, P(), whole)
    assert ({"reduce_scatter": 1}, {"all_gather": 1}) == moved(PENDING, shards, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_of_replicas_that_is_a_sum_is_reduced_once(dtype: torch.dtype) -> None:
    one = spmd.make_mesh({"x": 1}, runtime="virtual")
    for mesh in (one, LINE):
        x = spmd.distribute(values((12, 3), dtype), P(), mesh).requires_grad_()
        with spmd.comms_of() as sent:
            whole = x.redistribute([Replicate()]).full_tensor(grad_placements=[Partial()])
            whole.backward(torch.ones_like(whole))
        assert torch.equal(torch.full_like(whole, mesh.size), x.grad.full_tensor())
        assert sent.count() == ({} if mesh is one else {"all_reduce": 1})


def test_local_parts_of_a_sum_get_the_whole_gradient() -> None:
    parts = [torch.ones(12, 3, requires_grad=True) for _ in range(4)]
    with spmd.comms_of() as sent:
        whole = DTensor.from_local(parts, LINE, [Partial()]).redistribute(P())
    assert {"all_reduce": 1} == sent.count() and torch.equal(torch.full((12, 3), 4.0), whole.detach().full_tensor())
    with spmd.comms_of() as sent:
        whole.backward(spmd.ones(12, 3, mesh=LINE))
    assert {} == sent.count() and all(torch.equal(torch.ones(12, 3), part.grad) for part in parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("source", [P(), P("x"), P(None, "x")], ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_a_move_in_another_dtype_is_a_cast_and_a_move(shape: tuple[int, ...], source: P, dtype: torch.dtype) -> None:
    whole = values(shape)
    x = spmd.distribute(whole, source, LINE).requires_grad_()
    with spmd.comms_of() as sent:
        y = x.to(dtype).redistribute(P())
    assert sent.bytes == pytest.approx(0 if source == P() else dtype.itemsize * -(-max(whole.shape) // 4) * 9, rel=2)
    assert torch.equal(whole.to(dtype), y.detach().full_tensor())
    y.backward(spmd.ones_like(y.detach()))
    assert torch.float32 == x.grad.dtype and torch.equal(torch.ones(shape), x.grad.full_tensor())


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=str)
def test_replicas_become_parts_of_a_sum(mesh: spmd.Mesh) -> None:
    whole = values((12, 3))
    with spmd.comms_of() as sent:
        y = spmd.distribute(whole, P(), mesh).redistribute([Partial()] * len(mesh.names))
    assert {} == sent.count() and torch.equal(whole, y.full_tensor())
    assert torch.equal(whole, torch.stack(y.shards).sum(0))


def test_a_negative_dim() -> None:
    x = spmd.distribute(values((12, 3)), [Shard(1)], LINE)
    assert (Shard(1),) == x.placements == x.redistribute([Shard(-1)]).placements


@pytest.mark.parametrize("shape", [(10, 5), (9, 5), (3, 5), (1, 3)], ids=repr)
@pytest.mark.parametrize("spec", [[Shard(0), Shard(0)], [Shard(0), Shard(1)]], ids=repr)
def test_uneven_shards_on_two_axes(spec: Any, shape: tuple[int, ...]) -> None:
    whole = values(shape)
    assert torch.equal(whole, spmd.distribute(whole, spec, GRID).full_tensor())


CHANGES = [
    ([Shard(0), Shard(1)], [Shard(0), Shard(0)], 1),
    ([Shard(0), Shard(1)], [Shard(1), Shard(0)], 2),
    ([Shard(0), Shard(0)], [Shard(1), Shard(1)], 2),
    ([Shard(0), Shard(2)], [Shard(1), Shard(0)], 2),
    ([Shard(1), Shard(1)], [Shard(1), Shard(2)], 1),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 8), (8, 5), (5, 8), (5, 5)], ids=repr)
def test_another_dim_is_sharded(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = values(shape, dtype)
    for source, target in itertools.permutations([P("x"), P(None, "x")]):
        assert ({"all_to_all": 1}, {"all_to_all": 1}) == moved(source, target, whole)
    for source, target, most in CHANGES if len(shape) > 2 else CHANGES[:3]:
        given, wanted = (P.from_placements(placements, GRID) for placements in (source, target))
        assert most >= sum(moved(given, wanted, whole, GRID)[0].values())


def test_an_axis_of_one_rank_sends_nothing() -> None:
    mesh = spmd.make_mesh({"x": 4, "y": 1}, runtime="virtual")
    for source, target in itertools.product([Shard(1), Replicate(), Partial()], [Shard(0), Shard(1), Replicate()]):
        x = DTensor.from_local([values((16, 8))] * 4, mesh, [Shard(0), source])
        with spmd.comms_of(error=True):
            y = x.redistribute([Shard(0), target])
        assert (Shard(0), target) == y.placements and torch.equal(x.full_tensor(), y.full_tensor())


TO_PARTIAL: list[tuple[list[Any], list[Any]]] = [
    ([Partial(), Shard(0)], [Partial(), Shard(0)]),
    ([Partial(), Shard(0)], [Partial(), Shard(1)]),
    ([Shard(0), Partial()], [Replicate(), Partial()]),
    ([Shard(0), Partial("max")], [Replicate(), Partial("max")]),
    ([Shard(0), Replicate()], [Shard(0), Partial()]),
    ([Shard(0), Replicate()], [Replicate(), Partial()]),
    ([Shard(0), Shard(1)], [Replicate(), Partial()]),
    ([Shard(0), Partial("max")], [Replicate(), Partial("sum")]),
]


@pytest.mark.parametrize(("source", "target"), TO_PARTIAL, ids=repr)
def test_moves_to_a_pending_reduction(source: list[Any], target: list[Any]) -> None:
    x = DTensor.from_local([values((12, 8)) + rank for rank in range(4)], GRID, source)
    y = x.redistribute(target)
    assert tuple(target) == y.placements
    torch.testing.assert_close(y.full_tensor(), x.full_tensor())


KINDS = [Replicate(), Shard(0), Shard(1)]


@pytest.mark.parametrize(
    "mesh", [spmd.make_mesh({"x": 4, "y": 2}, runtime="virtual"), pytest.param(CUBE, marks=pytest.mark.slow)], ids=str
)
def test_every_move_on_meshes_of_several_axes(mesh: spmd.Mesh) -> None:
    whole, count = values((16, 24)), len(mesh.names)
    for given in itertools.product([*KINDS, Partial()], repeat=count):
        replicas = [Replicate() if isinstance(kind, Partial) else kind for kind in given]
        times = mesh.axis_size([n for n, kind in zip(mesh.names, given, strict=True) if isinstance(kind, Partial)])
        x = DTensor.from_local(spmd.distribute(whole, replicas, mesh).shards, mesh, given, shape=whole.shape)
        for wanted in itertools.product(KINDS, repeat=count):
            torch.testing.assert_close(x.redistribute(wanted).full_tensor(), times * whole)


CHANGES_3D = [
    ([Shard(0), Shard(0), Shard(0)], [Shard(1), Shard(1), Shard(1)], 3),
    ([Shard(0), Shard(1), Shard(0)], [Shard(1), Shard(0), Shard(0)], 3),
    ([Shard(0), Shard(1), Shard(2)], [Shard(2), Shard(1), Shard(0)], 2),
    ([Shard(1), Shard(0), Shard(0)], [Replicate(), Shard(0), Shard(0)], 1),
    ([Shard(1), Replicate(), Shard(0)], [Replicate(), Shard(0), Shard(0)], 2),
    ([Shard(0), Shard(0), Shard(1)], [Shard(0), Shard(1), Shard(2)], 2),
]


@pytest.mark.parametrize(("source", "target", "most"), CHANGES_3D, ids=repr)
def test_changes_on_three_axes_send_as_often_as_upstream_at_most(source: Any, target: Any, most: int) -> None:
    given, wanted = (P.from_placements(placements, CUBE) for placements in (source, target))
    assert most >= sum(moved(given, wanted, values((8, 8, 8)), CUBE)[0].values())


def orders(ndim: int) -> list[P]:
    """All ways to shard dims over the three axes of the cube, in every order of axes that share a dim."""
    found = {}
    for names in itertools.permutations(CUBE.names):
        for places in itertools.product(range(ndim), repeat=3):
            dims = [tuple(n for n, place in zip(names, places, strict=True) if place == dim) for dim in range(ndim)]
            found[P(*dims)] = None
    return list(found)


ORDERED = [
    (P(("x", "y", "z")), P(("y", "z"))), (P(("y", "x", "z")), P(("y", "z"))), (P(("y", "x", "z")), P(("x", "y"))),
    (P(("x", "y")), P("z", "y")), (P(("y", "x")), P(("x", "y"))),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), ORDERED, ids=repr)
def test_moves_between_orders_of_axes(source: P, target: P) -> None:
    moved(source, target, values((8, 8, 8)), CUBE)


@pytest.mark.parametrize("shape", [(16, 8), (17, 5), (13, 2, 13), (5, 4, 3, 1)], ids=repr)
def test_all_orders_of_axes_one_after_the_other(shape: tuple[int, ...]) -> None:
    whole, specs = values(shape), orders(len(shape))
    assert len(specs) == len(set(specs)) > 20
    x = spmd.distribute(whole, specs[0], CUBE)
    for spec in specs[:: 1 + len(specs) // 60]:
        x = x.redistribute(spec)
        expected = spmd.distribute(whole, spec, CUBE)
        assert all(torch.equal(a, b) for a, b in zip(expected.shards, x.shards, strict=True)), spec


@pytest.mark.parametrize("op", ["sum", "min"])
def test_orders_of_axes_from_pending_reductions(op: Any) -> None:
    for kinds in itertools.combinations([Shard(0), Shard(1), Partial(op), Replicate()], 3):
        sharded = {kind.dim for kind in kinds if isinstance(kind, Shard)}
        local = values(tuple(4 if dim in sharded else 8 for dim in range(2)))
        along = kinds.index(Partial(op)) if Partial(op) in kinds else None
        shards = [local + (0 if along is None else at[along]) for at in CUBE.coordinates()]
        x = DTensor.from_local(shards, CUBE, kinds)
        for spec in orders(2)[::7]:
            torch.testing.assert_close(x.redistribute(spec).full_tensor(), x.full_tensor())


def test_an_order_of_axes_is_what_strided_shards_are() -> None:
    mesh, whole = spmd.make_mesh({"x": 4, "y": 2}, runtime="virtual"), torch.arange(8)
    x = spmd.distribute(whole, P(("y", "x")), mesh)
    assert [0, 4, 1, 5, 2, 6, 3, 7] == [shard.item() for shard in x.shards]


# test_api.py


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.ReLU(), torch.nn.Linear(20, 20))


@pytest.mark.parametrize("spec", [[Shard(0)], [Shard(1)], [Shard(-1)], [Replicate()], [Partial()]], ids=repr)
def test_whole_tensors_are_placed_without_sending(spec: Any) -> None:
    whole = values((12, 12))
    with spmd.comms_of(error=True):
        x = spmd.distribute(whole, spec, LINE)
    assert torch.equal(whole, x.full_tensor()) and x.is_leaf
    assert (12, 12) == x.shape and x.placements[0] == (Shard(1) if spec == [Shard(-1)] else spec[0])


def test_placed_tensors_are_new_leaves() -> None:
    x = spmd.distribute(values((12, 3)) + 2, [Shard(0)], LINE)
    assert x.is_leaf and not x.requires_grad


def test_what_autograd_recorded_keeps_its_gradient() -> None:
    x = values((12, 3)).requires_grad_()
    spmd.distribute(x + 2, [Shard(0)], LINE).sum().backward()
    assert torch.equal(x.grad, torch.ones(12, 3))


@pytest.mark.parametrize("shape", [(13, 3, 3), (14, 3, 3), (3, 13, 3), (3, 14, 3), (3, 3, 13), (3, 3, 14)], ids=repr)
def test_uneven_shards_are_those_of_chunk(shape: tuple[int, ...]) -> None:
    dim, whole = shape.index(max(shape)), values(shape)
    x = spmd.distribute(whole, [Shard(dim)], LINE)
    for expected, shard in itertools.zip_longest(torch.chunk(whole, 4, dim), x.shards):
        assert torch.equal(expected, shard)


def assign(names: Any, spec: P) -> Callable[..., None]:
    """A `partition_fn` as torch's tests have it."""

    def partition(path: str, module: torch.nn.Module, mesh: spmd.Mesh) -> None:
        for key, value in list(module.named_parameters(recurse=False)) if names is None or path in names else ():
            module.register_parameter(key, torch.nn.Parameter(spmd.distribute(value, spec, mesh)))

    return partition


@pytest.mark.parametrize("names", [None, (), ("2",)], ids=repr)
@pytest.mark.parametrize("spec", [P("x"), P()], ids=repr)
def test_a_module_is_partitioned(names: Any, spec: P) -> None:
    plain, x = network(), values((8, 20))
    module = spmd.distribute_module(copy.deepcopy(plain), LINE, assign(names, spec))
    for name, value in module.named_parameters():
        assert (spec if names is None or name[0] in names else P()) == value.spec.pspec
    torch.testing.assert_close(module(spmd.distribute(x, P(), LINE)).full_tensor(), plain(x))


def test_functions_of_inputs_and_outputs() -> None:
    plain, x = network(), values((8, 20))
    module = spmd.distribute_module(
        copy.deepcopy(plain),
        LINE,
        input_fn=lambda module, inputs, mesh: DTensor.from_local(list(inputs[0].chunk(4)), mesh, [Shard(0)]),
        output_fn=lambda module, outputs, mesh: outputs.shards,
    )
    found = module(x)
    assert all(type(shard) is torch.Tensor for shard in found)
    torch.testing.assert_close(torch.cat(found), plain(x).detach())
    replicated = spmd.distribute_module(
        copy.deepcopy(plain), LINE, input_fn=lambda module, inputs, mesh: DTensor.from_local([inputs[0]] * 4, mesh, P())
    )
    replicated(x.requires_grad_()).sum().backward()
    plain(x).sum().backward()
    for expected, parameter in zip(plain.parameters(), replicated.parameters(), strict=True):
        assert (Replicate(),) == parameter.grad.placements
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


def test_what_requires_a_gradient_still_does() -> None:
    plain = network()
    plain[0].weight.requires_grad_(False)
    module = spmd.distribute_module(copy.deepcopy(plain), LINE)
    module(spmd.ones(2, 20, mesh=LINE)).sum().backward()
    assert module[0].weight.grad is None and module[0].bias.grad is not None


def test_casts() -> None:
    x = DTensor.from_local([torch.rand(10)] * 4, LINE, P()).to(torch.bfloat16)
    assert torch.bfloat16 == x.dtype == x.shards[0].dtype
    module = spmd.distribute_module(network(), LINE, lambda *_: None).to(torch.bfloat16)
    assert torch.bfloat16 == module[0].weight.dtype == module[0].weight.shards[0].dtype
    module = spmd.distribute_module(network(), LINE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.bfloat16 == module(spmd.rand(2, 20, spec=P("x"), mesh=LINE)).dtype


def test_parameters_on_the_meta_device_are_made_in_the_partition() -> None:
    def partition(path: str, module: torch.nn.Module, mesh: spmd.Mesh) -> None:
        for key, value in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, torch.nn.Parameter(spmd.empty_like(value, spec=P("x"), mesh=mesh)))

    with torch.device("meta"):
        module = network()
    for value in spmd.distribute_module(module, LINE, partition).parameters():
        assert isinstance(value, DTensor) and not value.is_meta and P("x") == value.spec.pspec


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_checkpoint_of_a_pending_reduction() -> None:
    x = DTensor.from_local([torch.randn(5, 5)] * 4, LINE, [Partial()])
    for call in (lambda: x.__create_write_items__("x", x), lambda: x.__create_chunk_list__()):
        with pytest.raises(ShardingError, match="still to be reduced"):
            call()
    with (
        pytest.raises(dcp.api.CheckpointException, match="still to be reduced"),
        tempfile.TemporaryDirectory() as folder,
    ):
        dcp.save({"x": x}, checkpoint_id=folder, no_dist=True)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "too few placements": (lambda: spmd.distribute(torch.ones(4, 4), [Shard(0)], GRID), ShardingError, "2 axes"),
    "a product": (lambda: P(partial={"y": "prod"}), ShardingError, "must be one of sum, max, min"),  # type: ignore[dict-item]
    "another mesh": (
        lambda: spmd.distribute(spmd.distribute(torch.ones(4), P(), GRID), P("x"), LINE),
        MeshError,
        "is on Mesh.x=2, y=2. and not on Mesh.x=4.",
    ),
    "dtypes of a move": (
        lambda: spmd.ones(4, mesh=LINE).redistribute(P("x"), forward_dtype=torch.bfloat16),  # type: ignore[call-arg]
        TypeError,
        "forward_dtype",
    ),
    "a hook of two arguments": (
        lambda: spmd.distribute_module(network(), LINE, input_fn=lambda inputs, mesh: inputs),
        ShardingError,
        "input_fn must take",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call()


# test_init.py


def test_initializers_write_to_dtensors() -> None:
    x = DTensor.from_local([torch.randn(8, 4) for _ in range(4)], LINE, [Shard(0)])
    assert torch.nn.init.constant_(x, 2.4) is x and torch.equal(torch.full((32, 4), 2.4), x.full_tensor())


FACTORIES: dict[str, Callable[..., Any]] = {
    "zeros": spmd.zeros, "ones": spmd.ones, "empty": spmd.empty,
    "full": lambda size, **given: spmd.full(size, 123.4, **given),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("spec", [[Shard(0)], [Shard(1)], [Shard(2)], [Replicate()]], ids=repr)
def test_factories(spec: Any, name: str) -> None:
    number = {"zeros": 0, "ones": 1, "full": 123.4}.get(name)
    for size in ([4, 8, 12], [5, 10, 15]):
        x = FACTORIES[name](size, spec=spec, mesh=LINE, requires_grad=True)
        assert x.requires_grad and torch.float32 == x.dtype and torch.device("cpu") == x.device
        for expected, shard in zip(spmd.distribute(torch.empty(size), spec, LINE).shards, x.shards, strict=True):
            assert expected.shape == shard.shape and (number is None or bool((shard == number).all()))
    assert () == FACTORIES[name]([], spec=[Replicate()], mesh=LINE).shards[0].shape


@pytest.mark.parametrize(
    ("mesh", "spec", "size", "shapes"),
    [
        (LINE, [Shard(0)], (32, 3), [(8, 3)] * 4),
        (LINE, [Shard(0)], (31, 3), [(8, 3)] * 3 + [(7, 3)]),
        (GRID, [Shard(0), Replicate()], (32, 4), [(16, 4)] * 4),
        (GRID, [Shard(0), Shard(1)], (32, 4), [(16, 2)] * 4),
        (GRID, [Shard(0), Shard(1)], (31, 3), [(16, 2), (16, 1), (15, 2), (15, 1)]),
    ],
)
def test_zeros_on_whole_meshes(mesh: spmd.Mesh, spec: Any, size: Any, shapes: Any) -> None:
    x = spmd.zeros(size, spec=spec, mesh=mesh)
    assert shapes == [tuple(shard.shape) for shard in x.shards] and not any(shard.any() for shard in x.shards)
