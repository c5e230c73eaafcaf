"""Drawn meshes, specs, bodies and batches against a loop over the ranks, where JAX has tests of its own `shard_map`."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from manual_cases import arange, assert_same, whole
from sampling import sample
from torch.func import grad, hessian, jvp, vmap

import spmd
from spmd import P
from spmd.core.spec import DTensorSpec, TensorMeta

MESHES = ((1,), (1, 1), (1, 2), (2, 2), (2, 4), (4, 2))
SHAPES = tuple(
    shape
    for ndim in range(1, 4)
    for shape in itertools.permutations(range(1, 4), ndim)
    if ndim == 1 or len(set(shape)) > 1
)
Tensors = tuple[torch.Tensor, ...]


@attrs.frozen
class Body:
    """What one rank computes: the function, the number of operands, the operands on which each result depends."""

    function: Callable[..., Any]
    operands: int = 1
    depends: tuple[tuple[int, ...], ...] = ((0,),)
    fits: Callable[..., bool] = lambda *shapes: True


def _multiply(a: Sequence[int], b: Sequence[int]) -> bool:
    return a[-1] == b[-2 if len(b) > 1 else 0] and (len(a) < 3 or len(b) < 3 or a[0] == b[0])


BODIES = {
    "identity": Body(lambda x: x),
    "flip": Body(lambda x, y: (y, x), 2, ((1,), (0,))),
    "transpose": Body(lambda x: x.permute(*reversed(range(x.ndim)))),
    "ravel": Body(torch.ravel),
    "product": Body(torch.matmul, 2, ((0, 1),), _multiply),
    "sines of a product": Body(lambda x, y: (x.sin() @ y).sin(), 2, ((0, 1),), _multiply),
    "relu": Body(lambda x: (x + 1).relu() - 1),
}


@attrs.frozen
class Case:
    """A body with a mesh, the specs of its operands and results, and its global operands."""

    body: Body
    mesh: spmd.Mesh
    ins: tuple[P, ...]
    outs: tuple[P, ...]
    args: Tensors

    def mapped(self) -> Callable[..., Any]:
        """The function under `shard_map`."""
        return spmd.shard_map(
            self.body.function, self.mesh, self.ins, self.outs if len(self.outs) > 1 else self.outs[0]
        )

    def over_ranks(self, *args: torch.Tensor) -> Any:
        """The function as a loop over the ranks, in plain torch: what lies at a coordinate is that rank's."""
        placed = [_spec(self.mesh, spec, arg) for spec, arg in zip(self.ins, args, strict=True)]
        found = {
            at: _results(self.body.function(*(_shard(spec, arg, at) for spec, arg in zip(placed, args, strict=True))))
            for at in self.mesh.coordinates()
        }
        results = tuple(
            _joined(self.mesh, spec, {at: values[number] for at, values in found.items()})
            for number, spec in enumerate(self.outs)
        )
        return results if len(results) > 1 else results[0]


def _results(value: Any) -> Tensors:
    return value if isinstance(value, tuple) else (value,)


def _spec(mesh: spmd.Mesh, spec: P, x: torch.Tensor) -> DTensorSpec:
    return DTensorSpec.make(mesh, spec, TensorMeta.of(x))


def _index(mesh: spmd.Mesh, axes: Sequence[str], at: Sequence[int]) -> int:
    index = 0
    for axis in axes:
        index = index * mesh.axis_size(axis) + at[mesh.names.index(axis)]
    return index


def _shard(spec: DTensorSpec, x: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
    for dim, axes in enumerate(spec.dims):
        x = x.chunk(spec.mesh.axis_size(axes), dim)[_index(spec.mesh, axes, at)] if axes else x
    return x


def _joined(mesh: spmd.Mesh, spec: P, shards: dict[Any, torch.Tensor]) -> torch.Tensor:
    first = next(iter(shards.values()))
    dims = [*spec.dims, *((),) * (first.ndim - len(spec.dims))]
    blocks = {tuple(_index(mesh, axes, at) for axes in dims): shard for at, shard in shards.items()}

    def join(prefix: tuple[int, ...]) -> torch.Tensor:
        dim = len(prefix)
        if dim == len(dims):
            return blocks[prefix]
        return torch.cat([join((*prefix, index)) for index in range(mesh.axis_size(dims[dim]))], dim)

    return join(())


def _drawn_spec(rng: random.Random, axes: Sequence[str], ndim: int) -> P:
    """Axes on dims of a tensor, in any order, each on one."""
    places = [(axis, rng.randrange(ndim)) for axis in rng.sample(list(axes), len(axes))]
    return P(*(tuple(axis for axis, place in places if place == dim) for dim in range(ndim)))


def draw(name: str, seed: int, one_axis: bool = False) -> Case:
    """A case of a body, drawn by a seed, with specs over all axes of the mesh or over one."""
    rng, body = random.Random(f"{name}{seed}"), BODIES[name]
    sizes = rng.choice(MESHES)
    mesh = spmd.make_mesh(dict(zip("ij", sizes, strict=False)), runtime="virtual")
    names = (mesh.names[seed % len(sizes)],) if one_axis else mesh.names
    choices = [shapes for shapes in itertools.product(SHAPES, repeat=body.operands) if body.fits(*shapes)]
    shapes = rng.choice(choices)
    ins, args = [], []
    for shape in shapes:
        spec = _drawn_spec(rng, [axis for axis in names if rng.random() < 0.6], len(shape))
        dims = [*spec.dims, *((),) * (len(shape) - len(spec.dims))]
        full = [size * mesh.axis_size(axes) for size, axes in zip(shape, dims, strict=True)]
        ins.append(spec)
        args.append((arange(*full) + 1) / math.prod(full))
    results = _results(body.function(*(torch.ones(shape) for shape in shapes)))
    outs = []
    for result, operands in zip(results, body.depends, strict=True):
        vary = {axis for operand in operands for dim in ins[operand].dims for axis in dim}
        axes = [axis for axis in names if axis in vary or rng.random() < 0.3]
        outs.append(_drawn_spec(rng, axes, result.ndim))
    return Case(body, mesh, tuple(ins), tuple(outs), tuple(args))


each = pytest.mark.parametrize("seed", sample(range(5), range(2)))
bodies = pytest.mark.parametrize("name", BODIES)


def loss(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    return lambda *args: sum((result.sin() * (1 + result.detach())).sum() for result in _results(function(*args)))


@each
@bodies
def test_values(name: str, seed: int) -> None:
    case = draw(name, seed)
    assert_same(case.mapped()(*case.args), case.over_ranks(*case.args))


@each
@bodies
def test_values_inside_jit(name: str, seed: int) -> None:
    case = draw(name, seed)
    assert_same(spmd.jit(case.mapped(), case.ins, mesh=case.mesh)(*case.args), case.over_ranks(*case.args))


@each
@bodies
@pytest.mark.parametrize("check", [True, False], ids=["check", "no check"])
def test_derivatives(name: str, seed: int, check: bool) -> None:
    case = draw(name, seed)
    outs = case.outs if len(case.outs) > 1 else case.outs[0]
    f = spmd.shard_map(case.body.function, case.mesh, case.ins, outs, check=check)
    numbers = tuple(range(len(case.args)))
    for derivative in (
        lambda g: grad(loss(g), numbers),
        lambda g: lambda *args: jvp(g, args, args)[1],
        lambda g: lambda *args: jvp(grad(loss(g), numbers), args, args)[1],
    ):
        given = spmd.jit(derivative(f), case.ins, mesh=case.mesh)(*case.args)
        assert_same(given, derivative(case.over_ranks)(*case.args))


@each
@bodies
def test_derivatives_of_dtensors(name: str, seed: int) -> None:
    case = draw(name, seed)
    numbers = tuple(range(len(case.args)))
    given = [spmd.distribute(arg, spec, case.mesh) for arg, spec in zip(case.args, case.ins, strict=True)]
    assert_same(grad(loss(case.mapped()), numbers)(*given), grad(loss(case.over_ranks), numbers)(*case.args))


def closing(case: Case, function: Callable[[Sequence[P]], Callable[..., Any]]) -> Callable[..., Any]:
    """`f(scale, *closed)`: the operands that are whole are closed over, the others are scaled in the body."""
    sharded = [number for number, spec in enumerate(case.ins) if spec.dims]

    def call(scale: torch.Tensor, *closed: torch.Tensor) -> Any:
        def body(*operands: torch.Tensor) -> Any:
            rest, own = iter(closed), iter(operands)
            args = [scale * next(own) if number in sharded else next(rest) for number in range(len(case.ins))]
            return case.body.function(*args)

        return function([case.ins[number] for number in sharded])(body)(*(case.args[number] for number in sharded))

    return call


def closures(case: Case) -> tuple[Callable[..., Any], Callable[..., Any], Tensors]:
    """The same function with a body that closes over operands, by shard_map and as a loop; and the closed operands."""
    outs = case.outs if len(case.outs) > 1 else case.outs[0]
    mapped = closing(case, lambda ins: lambda body: spmd.shard_map(body, case.mesh, tuple(ins), outs))
    looped = closing(
        case,
        lambda ins: (
            lambda body: attrs.evolve(case, body=attrs.evolve(case.body, function=body), ins=tuple(ins)).over_ranks
        ),
    )
    return mapped, looped, tuple(arg for arg, spec in zip(case.args, case.ins, strict=True) if not spec.dims)


@each
@bodies
def test_derivatives_of_closed_over_values(name: str, seed: int) -> None:
    case = draw(name, seed)
    mapped, looped, closed = closures(case)
    args = (torch.tensor(0.2, dtype=torch.float64), *closed)
    specs, numbers = (P(),) * len(args), tuple(range(len(args)))
    for derivative in (lambda g: grad(loss(g), numbers), lambda g: hessian(loss(g))):
        given = spmd.jit(derivative(mapped), specs, mesh=case.mesh)(*args)
        assert_same(given, derivative(looped)(*args))


def batched(case: Case, seed: int, size: int = 5) -> tuple[tuple[int | None, ...], Tensors]:
    """A batch dim for some of the operands, at least one, and the operands with it."""
    rng = random.Random(seed)
    while True:
        dims = tuple(rng.choice([None, *range(arg.ndim + 1)]) for arg in case.args)
        if any(dim is not None for dim in dims):
            break
    scales = torch.arange(1, size + 1, dtype=torch.float64)
    args = [
        arg if dim is None else (arg[None] * scales.view(-1, *[1] * arg.ndim)).movedim(0, dim)
        for arg, dim in zip(case.args, dims, strict=True)
    ]
    return dims, tuple(args)


@each
@bodies
@pytest.mark.parametrize("how", ["outside", "inside"])
def test_batches(name: str, seed: int, how: str) -> None:
    case = draw(name, seed)
    dims, args = batched(case, seed)
    specs = tuple(
        spec if dim is None else P(*[*spec.dims, *((),) * arg.ndim][:dim], None, *spec.dims[dim:])
        for spec, dim, arg in zip(case.ins, dims, args, strict=True)
    )
    f = vmap(case.mapped(), dims)
    if how == "inside":
        given = spmd.jit(f, specs, mesh=case.mesh)(*args)
    else:
        given = f(*(spmd.distribute(arg, spec, case.mesh) for arg, spec in zip(args, specs, strict=True)))
    row = lambda n: [arg if dim is None else arg.select(dim, n) for arg, dim in zip(args, dims, strict=True)]  # noqa: E731
    rows = [_results(case.over_ranks(*row(n))) for n in range(5)]
    assert_same(_results(whole(given)), tuple(map(torch.stack, zip(*rows, strict=True))))


@each
@bodies
def test_batches_of_closed_over_values(name: str, seed: int) -> None:
    case = draw(name, seed)
    mapped, looped, closed = closures(case)
    scales = torch.arange(5, dtype=torch.float64)
    dims = (0, *(None,) * len(closed))
    given = spmd.jit(vmap(mapped, dims), (P(),) * len(dims), mesh=case.mesh)(scales, *closed)
    assert_same(given, vmap(looped, dims)(scales, *closed))


@each
@bodies
def test_one_axis_at_a_time(name: str, seed: int) -> None:
    case = draw(name, seed, one_axis=True)
    outs = case.outs if len(case.outs) > 1 else case.outs[0]
    axes = (case.mesh.names[seed % len(case.mesh.names)],)
    f = spmd.shard_map(case.body.function, case.mesh, case.ins, outs, axis_names=axes)
    assert_same(spmd.jit(f, case.ins, mesh=case.mesh)(*case.args), case.over_ranks(*case.args))
