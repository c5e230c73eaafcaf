"""Collectives through `shard_map`: rows and their transposes are adjoint, and are plain loops over ranks.

A typed value is data: one tensor for each rank if it is varying, one for each group of ranks if it is invariant or
reduced; an unreduced one is fed as summands of the ranks, and read as their sum. The inner product of a value with a
cotangent is then that of their data, so an invariant value counts once for each group.
"""

import functools
import math

import attrs
import pytest
import torch
from sampling import product

from spmd import P, jit, make_mesh, shard_map
from spmd.collectives import all_gather, all_to_all, axis_size, pcast, pmax, pmin, ppermute, psum, psum_scatter

MESHES = {"line": {"x": 4}, "grid": {"x": 2, "y": 2}, "cube": {"x": 2, "y": 2, "z": 2}}
PLACES = [
    ("line", ("x",)), ("grid", ("x",)), ("grid", ("y",)), ("grid", ("x", "y")), ("grid", ("y", "x")),
    ("cube", ("z",)), ("cube", ("x", "z")), ("cube", ("z", "y", "x")),
]  # fmt: skip
COTANGENT = {"I": "I", "V": "V", "U": "R", "R": "U"}
WORDS = {"V": "varying", "U": "unreduced", "R": "reduced"}


@attrs.frozen
class Row:
    """A linear row of the table: what a rank calls, and the same for a list of the values of a group of ranks.

    Args:
        call: `call(x, axes, dim)`, for an x of the type `source`; the result is of the type `to`.
        whole: `whole(xs, dim)`.
        dims: the dims that it is called with.
    """

    name: str
    call: object
    whole: object
    source: str
    to: str
    dims: tuple = (0,)


def total(xs):
    return functools.reduce(torch.add, xs)


def same(make):
    return lambda xs, dim: [make(xs, dim)] * len(xs)


def scattered(x, axes, dim):
    return psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def summed(x, axes, dim):
    return psum(x, axes)


def gathered(to):
    return lambda x, axes, dim: all_gather(x, axes, axis=dim, tiled=True, to=to)


def cast(to):
    return lambda x, axes, dim: pcast(x, axes, to=to)


def chunks(xs, dim):
    return list(total(xs).chunk(len(xs), dim))


def exchange(xs, dim):
    pieces = [x.chunk(len(xs), dim) for x in xs]
    return [torch.cat([piece[rank] for piece in pieces], 1 - dim) for rank in range(len(xs))]


joined, everything = same(lambda xs, dim: torch.cat(xs, dim)), same(lambda xs, dim: total(xs))
unchanged = lambda xs, dim: xs  # noqa: E731
ROWS = [
    Row("psum", summed, everything, "V", "I"),
    Row("pcast to varying", cast("varying"), unchanged, "I", "V"),
    Row("all_gather", gathered("varying"), joined, "V", "V", (0, 1)),
    Row("all_gather to invariant", gathered("invariant"), joined, "V", "I", (0, 1)),
    Row("all_gather to reduced", gathered("reduced"), joined, "V", "R", (0, 1)),
    Row("psum_scatter", scattered, chunks, "V", "V", (0, 1)),
    Row("psum_scatter of unreduced", scattered, chunks, "U", "V", (0, 1)),
    Row("psum of unreduced", summed, everything, "U", "I"),
    Row("pcast to reduced", cast("reduced"), unchanged, "I", "R"),
    Row("pcast to unreduced", cast("unreduced"), unchanged, "V", "U"),
    Row("pcast of reduced", cast("varying"), unchanged, "R", "V"),
    Row("all_to_all", lambda x, a, dim: all_to_all(x, a, dim, 1 - dim, tiled=True), exchange, "V", "V", (0, 1)),
    Row(
        "ppermute",
        lambda x, a, dim: ppermute(x, a, [(rank, rank + 1) for rank in range(axis_size(a) - 1)]),
        lambda xs, dim: [torch.zeros_like(xs[0]), *xs[:-1]],
        "V",
        "V",
    ),
]
BY_NAME = {row.name: row for row in ROWS}
CALLS = [(row.name, dim) for row in ROWS for dim in row.dims]
each_place = pytest.mark.parametrize(("mesh_name", "axes"), PLACES, ids=[f"{m}-{''.join(a)}" for m, a in PLACES])
each_call_in_each_place = pytest.mark.parametrize(("called", "at"), product(CALLS, PLACES))


@attrs.frozen
class Place:
    """Where a row is called: a mesh, and some of its axes."""

    mesh: object
    axes: tuple

    @classmethod
    def of(cls, mesh_name, axes):
        return cls(make_mesh(MESHES[mesh_name], runtime="virtual"), axes)

    @property
    def groups(self):
        return self.mesh.groups(self.axes)

    @property
    def others(self):
        return tuple(axis for axis in self.mesh.names if axis not in self.axes)

    def spec(self, kind):
        """The spec of the data of a type that is fed: its first dim counts ranks, or groups."""
        return P(self.mesh.names if kind in "VU" else self.others or None)

    def shape(self, rows, kind="V"):
        count = math.prod(self.mesh.axes[axis] for axis in self.axes)
        return (self.mesh.size if kind in "VU" else len(self.groups), *(size * count for size in rows))

    def draw(self, kind, shape, seed):
        numbers = torch.Generator().manual_seed(seed)
        lead = self.mesh.size if kind in "VU" else len(self.groups)
        return torch.randn((lead, *shape), generator=numbers, dtype=torch.float64)

    def fed(self, kind, data):
        """In the body: a value of a type, of this rank's row of its data."""
        x = data[0]
        return pcast(x, self.axes, to=WORDS[kind]) if kind in "UR" else x

    def read(self, kind, x):
        """In the body: the value as the result of the body, with `read_spec`."""
        return (pcast(x, self.axes, to="varying") if kind == "R" else x)[None]

    def read_spec(self, kind):
        if kind == "U":
            return P(self.others or None, partial=dict.fromkeys(self.axes, "sum"))
        return P(self.mesh.names if kind in "VR" else self.others or None)

    def data(self, kind, tensor):
        """What was read as data: a reduced value is read from all ranks, which hold the same."""
        tensor = tensor.full_tensor()
        return torch.stack([tensor[group[0]] for group in self.groups]) if kind == "R" else tensor

    def summands(self, kind, data):
        """The data of the value that was fed: of an unreduced one the sum."""
        return torch.stack([total([data[rank] for rank in group]) for group in self.groups]) if kind == "U" else data

    def loop(self, row, dim, data):
        """The row on the fed data, as a loop over groups of ranks: the data of the result."""
        found = [None] * self.mesh.size
        firsts = []
        for number, group in enumerate(self.groups):
            xs = [data[rank] if row.source in "VU" else data[number] for rank in group]
            results = row.whole(xs, dim)
            firsts.append(total(results) if row.to == "U" else results[0])
            for rank, result in zip(group, results, strict=True):
                found[rank] = result
        return torch.stack(found if row.to == "V" else firsts)

    def mapped(self, body, sources, results):
        """A body from values of types to values of types, as a function of data."""

        def inner(*data):
            found = body(*map(self.fed, sources, data))
            return tuple(map(self.read, results, found if isinstance(found, tuple) else (found,)))

        return shard_map(inner, self.mesh, tuple(map(self.spec, sources)), tuple(map(self.read_spec, results)))

    def run(self, body, sources, results, *data):
        found = self.mapped(body, sources, results)(*data)
        return [self.data(kind, tensor) for kind, tensor in zip(results, found, strict=True)]


def problem(name, dim, place):
    """A row, its call, and fed data of the operand and of a cotangent of the result."""
    row = BY_NAME[name]
    count = math.prod(place.mesh.axes[axis] for axis in place.axes)
    x = place.draw(row.source, (count, 2 * count), 0)
    result = place.loop(row, dim, x)
    y = place.draw(COTANGENT[row.to], result.shape[1:], 1)
    return row, lambda value: row.call(value, place.axes, dim), x, y


@each_call_in_each_place
def test_a_row_is_a_loop_and_its_transpose_the_adjoint(called, at):
    place = Place.of(*at)
    row, call, x, y = problem(*called, place)
    kinds = row.to, COTANGENT[row.source]
    both = lambda x, y: (call(x), torch.func.vjp(call, x)[1](y)[0])  # noqa: E731
    value, pulled = place.run(both, (row.source, COTANGENT[row.to]), kinds, x, y)
    torch.testing.assert_close(value, place.loop(row, called[1], x))
    forward = (value * place.summands(COTANGENT[row.to], y)).sum()
    torch.testing.assert_close((pulled * place.summands(row.source, x)).sum(), forward)


@each_call_in_each_place
def test_the_transpose_of_the_transpose_is_the_operation(called, at):
    place = Place.of(*at)
    row, call, x, y = problem(*called, place)

    def twice(x, y):
        transpose = torch.func.vjp(call, x)[1]
        return torch.func.vjp(lambda y: transpose(y)[0], y)[1](x)[0]

    (found,) = place.run(twice, (row.source, COTANGENT[row.to]), (row.to,), x, y)
    torch.testing.assert_close(found, place.loop(row, called[1], x))


@pytest.mark.parametrize(
    ("called", "at"), product(CALLS, [("line", ("x",)), ("grid", ("y", "x")), ("cube", ("x", "z"))])
)
def test_gradients_of_first_and_second_order_are_those_of_a_loop(called, at):
    place = Place.of(*at)
    row, call, x, _ = problem(*called, place)
    direction = place.draw(row.source, x.shape[1:], 2)
    mapped = place.mapped(call, (row.source,), (row.to,))

    def orders(function, keep):
        loss = lambda x: (keep(function(x)) ** 3).sum()  # noqa: E731
        first = torch.func.grad(loss)
        return lambda x, v: (first(x), torch.func.grad(lambda x: (first(x) * v).sum())(x))

    # A reduced result is read from all ranks: the loss has it once for each.
    copies = len(place.groups[0]) if row.to == "R" else 1
    scaled = lambda x: place.loop(row, called[1], x) * copies ** (1 / 3)  # noqa: E731
    jitted = jit(orders(lambda x: mapped(x)[0], lambda x: x), P(), None, mesh=place.mesh)
    for found, expected in zip(jitted(x, direction), orders(scaled, lambda x: x)(x, direction), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize(("called", "dims"), product(CALLS, [(0, 0), (1, 2), (2, 1)]))
def test_vmap_is_a_loop(called, dims):
    in_dim, out_dim = dims
    place = Place.of("grid", ("y", "x"))
    row, call, x, y = problem(*called, place)
    xs, ys = (torch.stack([data, 2 - data, data.cos()], in_dim + 1) for data in (x, y))
    function = lambda x, y: (call(x), torch.func.vjp(call, x)[1](y)[0])  # noqa: E731
    kinds = row.to, COTANGENT[row.source]
    sources = row.source, COTANGENT[row.to]
    found = place.run(torch.vmap(function, in_dim, out_dim), sources, kinds, xs, ys)
    loops = [
        place.run(function, sources, kinds, one, other)
        for one, other in zip(xs.unbind(in_dim + 1), ys.unbind(in_dim + 1), strict=True)
    ]
    for result, expected in zip(found, zip(*loops, strict=True), strict=True):
        torch.testing.assert_close(result, torch.stack(expected, out_dim + 1))


def rows_on_processes(name, mesh):
    """The value, the transpose and the gradient of a row on the ranks of a mesh, against a loop."""
    for axes in [("x",), ("y", "x")]:
        place = Place(mesh, axes)
        for dim in BY_NAME[name].dims:
            row, call, x, y = problem(name, dim, place)
            both = lambda x, y, call=call: (call(x), torch.func.vjp(call, x)[1](y)[0])  # noqa: E731
            kinds = row.to, COTANGENT[row.source]
            value, pulled = place.run(both, (row.source, COTANGENT[row.to]), kinds, x, y)
            torch.testing.assert_close(value, place.loop(row, dim, x))
            forward = (value * place.summands(COTANGENT[row.to], y)).sum()
            torch.testing.assert_close((pulled * place.summands(row.source, x)).sum(), forward)


@pytest.mark.parametrize("name", BY_NAME)
def test_virtual_ranks_and_processes_are_alike(on_ranks, name):
    on_ranks(rows_on_processes, MESHES["grid"], name)


UNEVEN = {
    "line": (("x",), [5, 6, 2]),
    "grid": (("y", "x"), [5, 7, 3]),
}
UNEVEN_PLACES = [(mesh, axes, length) for mesh, (axes, lengths) in UNEVEN.items() for length in lengths]
each_uneven = pytest.mark.parametrize(("mesh_name", "axes", "length"), UNEVEN_PLACES, ids=str)


@pytest.mark.parametrize("to", ["varying", "reduced", "invariant"])
@each_uneven
def test_gathers_of_uneven_chunks_and_their_transposes(mesh_name, axes, length, to):
    place = Place.of(mesh_name, axes)
    kind = "I" if to == "invariant" else to[0].upper()
    x, y = torch.randn(length, 3, dtype=torch.float64), place.draw(COTANGENT[kind], (length, 3), 1)
    call = lambda x: all_gather(x, axes, tiled=True, size=length, to=to)  # noqa: E731

    def body(x, y):
        return place.read(kind, call(x)), torch.func.vjp(call, x)[1](place.fed(COTANGENT[kind], y))[0]

    mapped = shard_map(body, place.mesh, (P(axes), place.spec(COTANGENT[kind])), (place.read_spec(kind), P(axes)))
    value, pulled = mapped(x, y)
    torch.testing.assert_close(place.data(kind, value), x.expand_as(place.data(kind, value)))
    torch.testing.assert_close(pulled.full_tensor(), y.sum(0))


@pytest.mark.parametrize("source", ["V", "U"])
@each_uneven
def test_scatters_to_uneven_chunks_and_their_transposes(mesh_name, axes, length, source):
    place = Place.of(mesh_name, axes)
    x, y = place.draw(source, (length, 3), 0), torch.randn(length, 3, dtype=torch.float64)

    def body(x, y):
        call = lambda x: psum_scatter(x, axes, tiled=True, size=y.shape[0])  # noqa: E731
        x = place.fed(source, x)
        return call(x), place.read(COTANGENT[source], torch.func.vjp(call, x)[1](y)[0])

    kind = COTANGENT[source]
    mapped = shard_map(body, place.mesh, (place.spec(source), P(axes)), (P(axes), place.read_spec(kind)))
    value, pulled = mapped(x, y)
    torch.testing.assert_close(value.full_tensor(), x.sum(0))
    torch.testing.assert_close(place.data(kind, pulled), y.expand_as(place.data(kind, pulled)))


@pytest.mark.parametrize(("at", "kind"), product(PLACES, ["max", "min"]))
def test_extrema_have_the_derivative_of_differences(at, kind):
    place, axes = Place.of(*at), at[1]
    reduce = pmax if kind == "max" else pmin
    mapped = place.mapped(lambda x: reduce(x, axes), ("V",), ("I",))
    x, direction = place.draw("V", (2, 3), 0), place.draw("V", (2, 3), 1)
    loss = jit(lambda x: (mapped(x)[0] ** 3).sum(), P(), None, mesh=place.mesh)
    slope = jit(torch.func.grad(lambda x: (mapped(x)[0] ** 3).sum()), P(), None, mesh=place.mesh)
    pushed = jit(
        lambda x, v: torch.func.jvp(lambda x: (mapped(x)[0] ** 3).sum(), (x,), (v,))[1], P(), None, mesh=place.mesh
    )
    step = 1e-6
    difference = (loss(x + step * direction).full_tensor() - loss(x - step * direction).full_tensor()) / (2 * step)
    found = (slope(x).full_tensor() * direction).sum()
    torch.testing.assert_close(found, difference, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(pushed(x, direction).full_tensor(), found)


@pytest.mark.parametrize(("kind", "first"), [("max", 2.0), ("min", -2.0)])
@each_place
def test_ties_of_extrema_share_the_cotangent(kind, first, mesh_name, axes):
    place = Place.of(mesh_name, axes)
    reduce = pmax if kind == "max" else pmin
    x = torch.zeros(place.mesh.size, 1, dtype=torch.float64)
    for group in place.groups:  # two ranks of each group hold the extremum
        x[group[0]] = x[group[-1]] = first
    mapped = place.mapped(lambda x: reduce(x, axes), ("V",), ("I",))
    found = jit(torch.func.grad(lambda x: 6 * mapped(x)[0].sum()), P(), None, mesh=place.mesh)(x)
    torch.testing.assert_close(found.full_tensor(), 3 * (x == first).double())
