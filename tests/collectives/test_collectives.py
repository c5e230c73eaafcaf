import itertools
import math

import attrs
import optree.dataclasses
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from spmd.collectives import (
    all_gather,
    all_to_all,
    axis_environment,
    axis_index,
    axis_size,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    shard_offset,
)
from spmd.collectives.primitives import PRIMITIVES
from spmd.collectives.primitives.permute import inverse_permutation
from spmd.core.mesh import make_mesh
from spmd.core.spec import chunk_bounds
from spmd.errors import SpmdError
from spmd.runtime.lockstep import generate_lockstep
from spmd.runtime.virtual import run_in_lockstep
from spmd.tracing.trace import trace_flat

MESH = make_mesh({"x": 2, "y": 3}, runtime="virtual")
LINE = make_mesh({"y": 3}, runtime="virtual")
AXES = ["x", "y", ("x", "y"), ("y", "x")]
ops = torch.ops.spmd


def trace(function, mesh, args):
    """A function of pytrees as a program of one rank, and a function from its outputs to the pytree of results."""
    leaves, tree = tree_flatten(args)
    found = []

    def flat(*tensors):
        found[:] = tree_flatten(function(*tree_unflatten(tensors, tree)))
        return [leaf for leaf in found[0] if isinstance(leaf, torch.Tensor)]

    def result(outputs):
        rest = iter(outputs)
        leaves, tree = found
        return tree_unflatten([next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree)

    with axis_environment(mesh.axes):
        return trace_flat(flat, leaves), result


def lockstep(function, mesh, arguments):
    """What each rank computes: the programs of the ranks, traced one by one, run on all ranks together."""
    programs = [trace(function, mesh, args) for args in arguments]
    shards = list(zip(*(tree_flatten(args)[0] for args in arguments), strict=True))
    ranks = [generate_lockstep(graph, mesh, [rank]).start(shards) for rank, (graph, _) in enumerate(programs)]
    outputs = zip(*run_in_lockstep(mesh, ranks), strict=True)
    return [result(leaves) for leaves, (_, result) in zip(outputs, programs, strict=True)]


@attrs.frozen
class Case:
    """A collective, and the same on one device: a function from the arguments of a group of ranks to their results.

    Args:
        local: `local(x, axes, n, index)`.
        whole: `whole(xs)`.
        shape: `shape(n, index)` of a rank's argument.
        shared_argument, shared_result: whether all ranks of a group have one and the same.
    """

    name: str
    local: object
    whole: object
    shape: object = lambda n, i: (2, 3)
    shared_argument: bool = False
    shared_result: bool = False
    is_linear: bool = True


def same(result):
    return lambda xs: [result(xs)] * len(xs)


def chunk_size(size, n, index):
    start, stop = chunk_bounds(size, (n,), (index,))
    return stop - start


def pieces(x, dim, n):
    """The n chunks of torch.chunk, the empty ones too."""
    return [
        x.narrow(dim, start, stop - start) for start, stop in (chunk_bounds(x.shape[dim], (n,), (i,)) for i in range(n))
    ]


def exchange(split, concat):
    return lambda xs: [torch.cat([pieces(x, split, len(xs))[i] for x in xs], concat) for i in range(len(xs))]


def shifted(xs):
    return [torch.zeros_like(xs[0]), *xs[:-1]]


UNEVEN = 5  # over 2, 3 and 6 ranks: uneven chunks, and an empty one; nested chunks are here as flat ones

CASES = [
    Case("psum", lambda x, a, n, i: psum(x, a), same(sum), shared_result=True),
    Case("pmean", lambda x, a, n, i: pmean(x, a), same(lambda xs: sum(xs) / len(xs)), shared_result=True),
    Case(
        "pmax",
        lambda x, a, n, i: pmax(x, a),
        same(lambda xs: torch.stack(xs).amax(0)),
        shared_result=True,
        is_linear=False,
    ),
    Case(
        "pmin",
        lambda x, a, n, i: pmin(x, a),
        same(lambda xs: torch.stack(xs).amin(0)),
        shared_result=True,
        is_linear=False,
    ),
    Case("pcast", lambda x, a, n, i: pcast(x, a), lambda xs: xs, shared_argument=True),
    Case("all_gather stacked", lambda x, a, n, i: all_gather(x, a, axis=1), same(lambda xs: torch.stack(xs, 1))),
    Case(
        "all_gather tiled", lambda x, a, n, i: all_gather(x, a, axis=-1, tiled=True), same(lambda xs: torch.cat(xs, 1))
    ),
    Case(
        "all_gather uneven",
        lambda x, a, n, i: all_gather(x, a, tiled=True, size=UNEVEN),
        same(torch.cat),
        lambda n, i: (chunk_size(UNEVEN, n, i), 2),
    ),
    Case(
        "psum_scatter",
        lambda x, a, n, i: psum_scatter(x, a, scatter_dimension=1),
        lambda xs: list(sum(xs).unbind(1)),
        lambda n, i: (2, n),
    ),
    Case(
        "psum_scatter tiled",
        lambda x, a, n, i: psum_scatter(x, a, scatter_dimension=-1, tiled=True),
        lambda xs: list(sum(xs).chunk(len(xs), 1)),
        lambda n, i: (2, 2 * n),
    ),
    Case(
        "psum_scatter uneven",
        lambda x, a, n, i: psum_scatter(x, a, tiled=True, size=chunk_size(UNEVEN, n, i)),
        lambda xs: pieces(sum(xs), 0, len(xs)),
        lambda n, i: (UNEVEN, 2),
    ),
    Case(
        "all_to_all",
        lambda x, a, n, i: all_to_all(x, a, 1, 2),
        lambda xs: [torch.stack([x[:, i] for x in xs], 2) for i in range(len(xs))],
        lambda n, i: (2, n, 3),
    ),
    Case(
        "all_to_all tiled",
        lambda x, a, n, i: all_to_all(x, a, 0, 1, tiled=True),
        exchange(0, 1),
        lambda n, i: (2 * n, 3),
    ),
    Case(
        "all_to_all on one dim",
        lambda x, a, n, i: all_to_all(x, a, 1, 1, tiled=True),
        exchange(1, 1),
        lambda n, i: (3, 2 * n),
    ),
    Case(
        "all_to_all uneven",
        lambda x, a, n, i: all_to_all(x, a, 0, 1, tiled=True, sizes=(chunk_size(UNEVEN, n, i), UNEVEN)),
        exchange(0, 1),
        lambda n, i: (UNEVEN, chunk_size(UNEVEN, n, i)),
    ),
    Case("ppermute", lambda x, a, n, i: ppermute(x, a, [(r, r + 1) for r in range(n - 1)]), shifted),
    Case(
        "shard",
        lambda x, a, n, i: ops.shard(x, 1, chunk_size(UNEVEN, n, i), a),
        lambda xs: [pieces(x, 1, len(xs))[i] for i, x in enumerate(xs)],
        lambda n, i: (2, UNEVEN),
        shared_argument=True,
    ),
    Case(
        "all_gather_invariant",
        lambda x, a, n, i: ops.all_gather_invariant(x, 0, UNEVEN, a),
        same(torch.cat),
        lambda n, i: (chunk_size(UNEVEN, n, i), 2),
        shared_result=True,
    ),
    Case(
        "to_partial",
        lambda x, a, n, i: ops.to_partial(x, "sum", a),
        lambda xs: [xs[0], *(torch.zeros_like(x) for x in xs[1:])],
    ),
]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_axes = pytest.mark.parametrize("axes", AXES[1:3], ids=str)


def names(axes):
    return (axes,) if isinstance(axes, str) else axes


@attrs.frozen
class Problem:
    """A case on a whole mesh: the tensors of every rank, per-rank code, and the same over all groups on one device."""

    mesh: object
    case: Case
    axes: object
    n: int
    index: list

    @classmethod
    def of(cls, case, axes, mesh=MESH):
        axes = names(axes)
        return cls(mesh, case, list(axes), mesh.axis_size(axes), [mesh.axis_index(c, axes) for c in mesh.coordinates()])

    def draw(self, shape):
        return torch.randn(shape, dtype=torch.float64)

    def arguments(self):
        return self.shared(self.case.shared_argument, lambda i: self.case.shape(self.n, i))

    def shared(self, is_shared, shape):
        """A tensor for each rank; one for each group if it is shared."""
        tensors = [None] * self.mesh.size
        for group in self.mesh.groups(self.axes):
            drawn = [self.draw(shape(self.index[rank])) for rank in group]
            for rank, tensor in zip(group, drawn, strict=True):
                tensors[rank] = drawn[0] if is_shared else tensor
        return tensors

    def whole(self, xs):
        results = [None] * self.mesh.size
        for group in self.mesh.groups(self.axes):
            for rank, result in zip(group, self.case.whole([xs[rank] for rank in group]), strict=True):
                results[rank] = result
        return results

    def local(self, x, index):
        return self.case.local(x, self.axes, self.n, int(index))

    def weights(self, xs):
        results = self.whole(xs)
        ranks = iter(range(self.mesh.size))
        weights = [self.draw(results[rank].shape) for rank in ranks]
        if self.case.shared_result:
            for group in self.mesh.groups(self.axes):
                for rank in group:
                    weights[rank] = weights[group[0]]
        return weights

    def counted(self, is_shared):
        """The ranks whose terms make up a sum over all: one a group if the terms are one shared value."""
        return [group[0] for group in self.mesh.groups(self.axes)] if is_shared else range(self.mesh.size)

    def total(self, xs, weights):
        """The sum of all ranks' losses, on one device."""
        results = self.whole(xs)
        return sum((weights[rank] * results[rank] ** 3).sum() for rank in self.counted(self.case.shared_result))

    def gradients(self, function, xs):
        """The gradients of a function of all ranks' tensors; a shared one gets the sum over its copies."""
        gradients = torch.autograd.grad(function(xs), xs, create_graph=True, materialize_grads=True)
        if not self.case.shared_argument:
            return list(gradients)
        summed = [None] * self.mesh.size
        for group in self.mesh.groups(self.axes):
            for rank in group:
                summed[rank] = sum(gradients[other] for other in group)
        return summed


def loss(problem, index):
    return lambda x, w: (w * problem.local(x, index) ** 3).sum()


def run_each(problem, make, arguments):
    """Lock step where `make(index)` is the code of a rank: tracing asks for the ranks in order."""
    ranks = iter(problem.index)
    return lockstep(lambda *args: make(next(ranks))(*args), problem.mesh, arguments)


def assert_close(expected, actual):
    for left, right in zip(expected, actual, strict=True):
        torch.testing.assert_close(right, left)


@each_case
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_values(case, axes):
    problem = Problem.of(case, axes)
    xs = problem.arguments()
    results = run_each(problem, lambda index: lambda x: problem.local(x, index), [(x,) for x in xs])
    assert_close(problem.whole(xs), results)


@each_case
@each_axes
def test_gradients_are_those_of_one_device(case, axes):
    problem = Problem.of(case, axes)
    xs = [x.clone().requires_grad_() for x in problem.arguments()]
    weights = problem.weights(xs)
    expected = problem.gradients(lambda xs: problem.total(xs, weights), xs)
    arguments = [(x.detach(), w) for x, w in zip(xs, weights, strict=True)]
    assert_close(
        [g.detach() for g in expected], run_each(problem, lambda i: torch.func.grad(loss(problem, i)), arguments)
    )


@each_case
def test_second_order(case):
    problem = Problem.of(case, "y", LINE)
    xs = [x.clone().requires_grad_() for x in problem.arguments()]
    weights, directions = problem.weights(xs), problem.arguments()

    def slope(xs):
        gradients = problem.gradients(lambda xs: problem.total(xs, weights), xs)
        return sum((gradients[rank] * directions[rank]).sum() for rank in problem.counted(case.shared_argument))

    def local_slope(index):
        gradient = torch.func.grad(loss(problem, index))
        return torch.func.grad(lambda x, w, v: (gradient(x, w) * v).sum())

    expected = problem.gradients(slope, xs)
    arguments = [(x.detach(), w, v) for x, w, v in zip(xs, weights, directions, strict=True)]
    assert any(g.abs().sum() > 0 for g in expected)
    assert_close([g.detach() for g in expected], run_each(problem, local_slope, arguments))


@each_case
def test_forward_mode(case):
    problem = Problem.of(case, "y", LINE)
    xs, tangents = problem.arguments(), problem.arguments()
    cubed = lambda index: lambda x: problem.local(x**3, index)  # noqa: E731
    expected = [
        torch.func.jvp(lambda *xs, rank=rank: problem.whole([x**3 for x in xs])[rank], tuple(xs), tuple(tangents))[1]
        for rank in range(LINE.size)
    ]
    arguments = list(zip(xs, tangents, strict=True))
    results = run_each(problem, lambda index: lambda x, t: torch.func.jvp(cubed(index), (x,), (t,))[1], arguments)
    assert_close(expected, results)


def test_forward_mode_nests():
    def slope(function):
        return lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]

    mesh = make_mesh({"x": 2}, runtime="virtual")
    arguments = [(torch.tensor(1.0),), (torch.tensor(4.0),)]
    results = lockstep(slope(slope(lambda x: psum(x, "x") ** 3)), mesh, arguments)
    assert [6 * 5 * 2**2] * 2 == [result.item() for result in results]  # d/dt² (5 + 2t)³ at t = 0


@each_case
@pytest.mark.parametrize("in_dim", [0, -1])
def test_vmap_is_a_loop(case, in_dim):
    problem = Problem.of(case, "y", LINE)
    batch = [problem.arguments() for _ in range(2)]
    weights = problem.weights(batch[0])

    def both(index):
        return lambda x, w: (problem.local(x, index), torch.func.grad(loss(problem, index))(x, w))

    loops = [run_each(problem, both, list(zip(xs, weights, strict=True))) for xs in batch]
    stacked = [(torch.stack(xs, in_dim), w) for xs, w in zip(zip(*batch, strict=True), weights, strict=True)]
    results = run_each(problem, lambda index: torch.vmap(both(index), in_dims=(in_dim, None)), stacked)
    for rank, (values, gradients) in enumerate(results):
        assert_close([torch.stack([loop[rank][0] for loop in loops])], [values])
        assert_close([torch.stack([loop[rank][1] for loop in loops])], [gradients])


@each_axes
@pytest.mark.parametrize("case", [case for case in CASES if case.is_linear], ids=lambda case: case.name)
def test_the_transpose_is_the_adjoint(case, axes):
    problem = Problem.of(case, axes)
    xs = problem.arguments()
    ys = problem.weights(xs)
    both = run_each(
        problem,
        lambda index: (
            lambda x, y: (problem.local(x, index), torch.func.vjp(lambda x: problem.local(x, index), x)[1](y)[0])
        ),
        list(zip(xs, ys, strict=True)),
    )
    forward = sum((both[rank][0] * ys[rank]).sum() for rank in problem.counted(case.shared_result))
    backward = sum((both[rank][1] * xs[rank]).sum() for rank in problem.counted(case.shared_argument))
    torch.testing.assert_close(backward, forward)


def test_ties_of_an_extremum_share_its_gradient():
    xs = [torch.tensor([2.0, 1.0, math.inf]), torch.tensor([2.0, 5.0, math.inf]), torch.tensor([-1.0, 5.0, 0.0])]
    mesh = make_mesh({"x": 3}, runtime="virtual")
    gradients = lockstep(
        torch.func.grad(lambda x: (pmax(x, "x") * torch.tensor([6.0, 8.0, 4.0])).sum()), mesh, [(x,) for x in xs]
    )
    assert [[3.0, 0.0, 2.0], [3.0, 4.0, 2.0], [0.0, 4.0, 0.0]] == [g.tolist() for g in gradients]


TRANSPOSES = {
    "all_reduce": "pcast", "pcast": "all_reduce", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all", "permute": "permute", "shard": "all_gather_invariant",
    "all_gather_invariant": "shard", "to_partial": "to_partial", "all_reduce_unreduced": "pcast",
    "all_gather_reduced": "reduce_scatter_unreduced", "reduce_scatter_unreduced": "all_gather_reduced",
    "ragged_all_to_all": "ragged_all_to_all",
}  # fmt: skip
CALLS = {
    "all_reduce": ("sum", ["x"]), "pcast": ("invariant", "varying", ["x"]), "all_gather": (0, 8, ["x"]),
    "reduce_scatter": ("sum", 0, 2, ["x"]), "all_to_all": (0, 1, 2, 4, ["x"]), "permute": ([1, 0], [4, 2], ["x"]),
    "shard": (0, 2, ["x"]), "all_gather_invariant": (0, 8, ["x"]), "to_partial": ("sum", ["x"]),
    "all_reduce_unreduced": ("sum", ["x"]), "all_gather_reduced": (0, 8, ["x"]),
    "reduce_scatter_unreduced": ("sum", 0, 2, ["x"]),
    "ragged_all_to_all": (torch.zeros(2, 6, 2, dtype=torch.int64), 6, False, ["x"]),
}  # fmt: skip


def primitives_of(function, *args):
    graph, _ = trace(function, MESH, args)
    return [operation.op for operation in graph.operations if operation.op.namespace == "spmd"]


@pytest.mark.parametrize("primitive", PRIMITIVES, ids=lambda primitive: primitive.name)
def test_a_primitive_is_one_operation_and_its_gradient_its_transpose(primitive):
    call = lambda x: primitive.op(x, *CALLS[primitive.name])  # noqa: E731
    expected = [primitive.op, getattr(ops, TRANSPOSES[primitive.name]).default]
    assert expected[:1] == primitives_of(call, torch.randn(4, 2))
    assert expected == primitives_of(torch.func.grad(lambda x: call(x).sum()), torch.randn(4, 2))


def test_autograd_outside_of_torch_func():
    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(psum(x, "x").sum() ** 2, x)[0]

    mesh = make_mesh({"x": 2}, runtime="virtual")
    xs = [torch.tensor([value]) for value in (1.0, 4.0)]
    assert [[10.0], [10.0]] == [g.tolist() for g in lockstep(gradient, mesh, [(x,) for x in xs])]


def test_no_grad_stops_gradients_of_all_levels():
    def function(x):
        with torch.no_grad():
            constant = psum(x, "x")
        return constant * x**2

    mesh = make_mesh({"x": 2}, runtime="virtual")
    arguments = [(torch.tensor(1.0),), (torch.tensor(4.0),)]
    assert [10.0, 40.0] == [g.item() for g in lockstep(torch.func.grad(function), mesh, arguments)]
    second = torch.func.grad(torch.func.grad(function))
    assert [10.0, 10.0] == [g.item() for g in lockstep(second, mesh, arguments)]


def test_constants_are_not_folded_at_tracing():
    results = lockstep(lambda x: x + psum(torch.tensor(1.0), ("x", "y")), MESH, [(torch.zeros(()),)] * 6)
    assert [6.0] * 6 == [result.item() for result in results]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 4, 5, 12])
def test_indices_and_offsets(axes, size):
    results = lockstep(lambda x: (axis_index(axes) + x, shard_offset(size, axes) + x), MESH, [(torch.tensor(0),)] * 6)
    sizes = [MESH.axis_size(axis) for axis in names(axes)]
    offsets = [chunk_bounds(size, sizes, index)[0] for index in itertools.product(*map(range, sizes))]
    for coordinate, (index, offset) in zip(MESH.coordinates(), results, strict=True):
        expected = MESH.axis_index(coordinate, names(axes))
        assert (expected, offsets[expected]) == (index.item(), offset.item())
        assert (torch.int64, torch.int64) == (index.dtype, offset.dtype)


def test_trees_numbers_and_dtypes():
    mesh = make_mesh({"x": 3}, runtime="virtual")

    def function(flag, count):
        tree = psum({"flag": flag, "count": (count, 2)}, "x")
        return tree, pmean(count, "x"), pmax([flag, 2.5], "x"), pmin(flag, "x"), pmean(1.5, "x")

    arguments = [(torch.tensor([rank == 0, True]), torch.tensor(rank, dtype=torch.int32)) for rank in range(3)]
    tree, mean, largest, smallest, number = lockstep(function, mesh, arguments)[1]
    assert ([1, 3], torch.int64) == (tree["flag"].tolist(), tree["flag"].dtype)
    assert (3, torch.int32, 6) == (tree["count"][0].item(), tree["count"][0].dtype, tree["count"][1])
    assert (1.0, torch.float32) == (mean.item(), mean.dtype)
    assert ([True, True], 2.5) == (largest[0].tolist(), largest[1])
    assert ([False, True], 1.5) == (smallest.tolist(), number)


def test_axis_sizes_and_their_errors():
    with axis_environment({"x": 2}), axis_environment({"y": 3}):
        assert (2, 3, 6, 1) == (axis_size("x"), axis_size("y"), axis_size(("x", "y")), axis_size(()))
        with pytest.raises(SpmdError, match="Axis 'x' has size 2 here and cannot be bound again with size 4"):  # noqa: SIM117
            with axis_environment({"x": 4}):
                pass
        with pytest.raises(SpmdError, match="Unknown mesh axis 'z' in axis_name='z': inside which axes are 'x', 'y'"):
            psum(torch.ones(2), "z")
        with pytest.raises(SpmdError, match="Mesh axis 'x' is named twice"):
            psum(torch.ones(2), ("x", "x"))
    with pytest.raises(
        SpmdError, match=r"No mesh axis is bound at .* \(got axis_name='x'\). Use .* inside spmd.shard_map"
    ):
        axis_size("x")


ERRORS = {
    "psum: every leaf of 'x' must be a tensor (got str)": lambda x: psum("one", "y"),
    "all_gather: 'axis' must lie in -2..1 (got 2)": lambda x: all_gather(x, "y", axis=2, tiled=True),
    "all_gather: 'size' is for tiled=True only (got size=4)": lambda x: all_gather(x, "y", size=4),
    "psum_scatter: dim 0 of [4, 2] must divide into 3 equal chunks": lambda x: psum_scatter(x, "y", tiled=True),
    "psum_scatter: dim 0 of [4, 2] must have the length 3, the number of ranks": lambda x: psum_scatter(x, "y"),
    "psum_scatter: 'size' is for tiled=True only (got size=4)": lambda x: psum_scatter(x, "y", size=4),
    "all_to_all: dim 1 of [4, 2] must have the length 3": lambda x: all_to_all(x, "y", 1, 0),
    "ppermute: perm must hold indices in 0..2 (got (0, 3))": lambda x: ppermute(x, "y", [(0, 3)]),
    "ppermute: a source or destination is there twice in perm=[(0, 1), (0, 2)]": lambda x: ppermute(
        x, "y", [(0, 1), (0, 2)]
    ),
    "pcast: 'to' must be one of 'varying', 'unreduced', 'reduced' (got 'invariant')": lambda x: pcast(
        x, "y", to="invariant"
    ),
    "spmd::all_reduce was called outside of a runtime": lambda x: psum(x, "y"),
    "spmd::axis_index was called outside of a runtime": lambda x: axis_index("y"),
    "spmd::reduce_scatter can be differentiated for op='sum' only": lambda x: primitives_of(
        torch.func.grad(lambda x: ops.reduce_scatter(x, "max", 0, 2, ["x"]).sum()), x
    ),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text):
    with axis_environment(MESH.axes), pytest.raises(SpmdError) as caught:
        ERRORS[text](torch.ones(4, 2))
    assert text in str(caught.value)


def test_no_axes_mean_no_collective():
    assert [] == primitives_of(lambda x: (psum(x, ()), pcast(x, ())), torch.ones(2))


def test_inverse_permutation():
    assert [-1, 0, 2] == inverse_permutation([1, -1, 2])


@optree.dataclasses.dataclass(namespace="spmd")
class Pair:
    first: object
    second: object


def test_containers_of_the_package_s_namespace() -> None:
    with axis_environment({"data": 2}):
        assert Pair(6, 8) == psum(Pair(3, 4), "data")
