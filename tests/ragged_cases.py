"""Uneven exchanges for tests of `ragged_all_to_all`, with a plain loop over the ranks as reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from spmd.api.jit import jit
from spmd.api.shard_map import shard_map
from spmd.api.values.distribute import distribute
from spmd.collectives import ragged_all_to_all
from spmd.core.mesh import Mesh
from spmd.core.spec import P
from spmd.errors import SpmdError
from spmd.testing.executed import ExecutedCollectives

RANKS = 4


@attrs.frozen(eq=False)
class Case:
    """An exchange: matrices of sizes and offsets by sender and receiver, and the rows of operand and output on a rank.

    The last rank has so many rows less as are `missing`.
    """

    sizes: torch.Tensor
    starts: torch.Tensor
    places: torch.Tensor
    rows: int
    capacity: int
    missing: int = 0

    @classmethod
    def packed(cls, sizes: list[list[int]], reverse: bool = False) -> Case:
        """Pieces one after the other, from row 1 on; received in reverse order of the ranks, if asked."""
        held = torch.tensor(sizes)
        received = held.flip(0) if reverse else held
        places = received.cumsum(0) - received
        places = 1 + (places.flip(0) if reverse else places)
        return cls(held, 1 + held.cumsum(1) - held, places, 2 + int(held.sum(1).max()), 2 + int(held.sum(0).max()))

    @property
    def vectors(self) -> tuple[torch.Tensor, ...]:
        """The four vectors of all ranks, joined."""
        return tuple(matrix.reshape(-1) for matrix in (self.starts, self.sizes, self.places, self.sizes.T))

    def tensors(self, *tail: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Operands and outputs of all ranks, joined, with rows of the shape `tail`."""
        generator = torch.Generator().manual_seed(1)
        lengths = [RANKS * rows - self.missing for rows in (self.rows, self.capacity)]
        first, second = (torch.randn(n, *tail, dtype=torch.float64, generator=generator) for n in lengths)
        return first, second

    def loop(self, operand: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """What all ranks get, joined: one rank after the other."""
        operands, outputs = operand.split(self.rows), list(output.split(self.capacity))
        for sender in range(RANKS):
            for receiver in range(RANKS):
                count = int(self.sizes[sender, receiver])
                start, place = int(self.starts[sender, receiver]), int(self.places[sender, receiver])
                result = outputs[receiver]
                piece = operands[sender][start : start + count]
                outputs[receiver] = torch.cat([result[:place], piece, result[place + count :]])
        return torch.cat(outputs)


OVERLAPPING = attrs.evolve(Case.packed([[2] * RANKS] * RANKS), starts=torch.arange(RANKS).repeat(RANKS, 1))
"""Every rank sends every row but its first and last to two others, and to itself."""

CASES = {
    "even": Case.packed([[2] * RANKS] * RANKS),
    "uneven": Case.packed([[0, 3, 1, 2], [4, 0, 0, 1], [1, 1, 1, 1], [0, 2, 5, 0]]),
    "reversed": Case.packed([[0, 3, 1, 2], [4, 0, 0, 1], [1, 1, 1, 1], [0, 2, 5, 0]], reverse=True),
    "one sender": Case.packed([[0] * RANKS, [3, 2, 1, 4], [0] * RANKS, [0] * RANKS]),
    "nothing": Case.packed([[0] * RANKS] * RANKS),
    "uneven shards": attrs.evolve(Case.packed([[1, 0, 2, 0], [0, 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0]]), missing=3),
    "overlapping sends": OVERLAPPING,
}


def exchange(mesh: Mesh, axis_name: Any = None, **options: Any) -> Callable[..., Any]:
    """`ragged_all_to_all` as a function of what all ranks hold, joined."""
    axes = axis_name or mesh.names

    def body(operand: Any, output: Any, *vectors: Any) -> Any:
        return ragged_all_to_all(operand, output, *vectors, axis_name=axes)

    return shard_map(body, mesh, P(axes), P(axes), **options)  # type: ignore[no-any-return]


def values_and_gradients(mesh: Mesh) -> Any:
    """Values, and the gradients of the sum of their cubes, of a program."""
    run = exchange(mesh)

    def step(operand: Any, output: Any, *vectors: Any) -> Any:
        def loss(operand: Any, output: Any) -> Any:
            found = run(operand, output, *vectors)
            return (found**3).sum(), found

        return torch.func.grad(loss, (0, 1), has_aux=True)(operand, output)

    return jit(step, P(mesh.names), P(mesh.names), mesh=mesh)


def check_values_and_gradients(name: str, tail: tuple[int, ...], mesh: Mesh) -> None:
    case = CASES[name]
    operand, output = case.tensors(*tail)
    expected = torch.func.grad(lambda *both: (case.loop(*both) ** 3).sum(), (0, 1))(operand, output)
    step = values_and_gradients(mesh)
    for _ in range(2):  # the second call has other work in flight
        gradients, found = step(operand, output, *case.vectors)
    torch.testing.assert_close(found.full_tensor(), case.loop(operand, output), rtol=0, atol=0)
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got.full_tensor(), wanted)


def check_dtype(dtype: torch.dtype, mesh: Mesh) -> None:
    """Rows of a dtype, of an operand and an output that lie in memory column by column."""
    case = CASES["uneven"]
    operand, output = ((x * 4).to(dtype) for x in case.tensors(3))
    run = exchange(mesh)
    strided = [x.T.contiguous().T for x in (operand, output)]
    found = run(*strided, *case.vectors)
    assert found.dtype == dtype
    torch.testing.assert_close(found.full_tensor(), case.loop(operand, output), rtol=0, atol=0)


def check_batch_of_sizes(mesh: Mesh) -> None:
    """The elements of a batch are not sent as one."""
    cases = [CASES["uneven"], CASES["reversed"]]
    operand, output = cases[0].tensors(3)
    vectors = [torch.stack(pair) for pair in zip(*(case.vectors for case in cases), strict=True)]

    def step(operand: Any, output: Any, *vectors: Any) -> Any:
        def loss(operand: Any, output: Any) -> Any:
            return (torch.vmap(lambda *v: exchange(mesh)(operand, output, *v))(*vectors) ** 3).sum()

        return torch.func.grad(loss, (0, 1))(operand, output)

    gradients = jit(step, P(), mesh=mesh)(operand, output, *vectors)
    wanted = torch.func.grad(lambda *both: sum((case.loop(*both) ** 3).sum() for case in cases), (0, 1))
    for got, expected in zip(gradients, wanted(operand, output), strict=True):
        torch.testing.assert_close(got.full_tensor(), expected)


def check_alone(mesh: Mesh) -> None:
    """Rows that a rank sends to itself move, although operand and output are alike."""
    operand, output = torch.arange(4.0), torch.zeros(4)
    vectors = [torch.tensor([number]) for number in (1, 2, 0, 2)]
    for run in (exchange(mesh), jit(exchange(mesh), mesh=mesh)):
        assert [1.0, 2.0, 0.0, 0.0] == run(operand, output, *vectors).full_tensor().tolist()


WRONG: dict[str, Callable[[Case], tuple[torch.Tensor, ...]]] = {
    "sizes": lambda case: (*case.vectors[:3], case.sizes.T.reshape(-1) + torch.eye(RANKS).long().roll(1, 0).view(-1)),
    "operand": lambda case: (case.vectors[0] + 2 * (torch.arange(RANKS**2) == 7), *case.vectors[1:]),
    "output": lambda case: (*case.vectors[:2], case.vectors[2] - 2 * (torch.arange(RANKS**2) == 1), case.vectors[3]),
    "twice": lambda case: (*case.vectors[:2], torch.ones(RANKS**2, dtype=torch.int64), case.vectors[3]),
    "negative": lambda case: (case.vectors[0], *[vector * 0 - 1 for vector in case.vectors[1:]]),
}
"""Vectors that are wrong, of the even case."""


def error_of(name: str, mesh: Mesh) -> str:
    """The message of the error that wrong vectors raise when a program runs."""
    case = CASES["even"]
    try:
        exchange(mesh)(*case.tensors(3), *WRONG[name](case))
    except SpmdError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{name} raised nothing")


def planned_and_sent(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    """The collectives of the plan of a gradient, and those that ran in this process."""
    case = CASES["uneven"]
    step, arguments = values_and_gradients(mesh), (*case.tensors(3), *case.vectors)
    placed = distribute(arguments, P(mesh.names), mesh)
    step(*placed)
    with ExecutedCollectives() as executed:
        step(*placed)
    return list(step.plan(*placed).comms), executed.found
