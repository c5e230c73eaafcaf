"""Assigns the operations of a plan, both the program's and inserted ones, to the copies of repeated parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import attrs

from spmd.ir.graph import Operation
from spmd.plan.data.plan import PlanData
from spmd.plan.search.repeats import Repeat


@attrs.frozen
class Place:
    """The place of an operation in a program: the numbers of its repeat and copy, and its position in the copy."""

    repeat: int
    copy: int
    position: int


Share = tuple[tuple[int, Operation], ...]
"""The operations of a plan that belong to one copy, each with the position in the copy to which it is assigned."""


def find_shares(plan: PlanData, repeats: Sequence[Repeat]) -> dict[tuple[int, int], Share]:
    """The operations of a plan that belong to each copy, in order of execution, by the numbers of repeat and copy.

    An operation that planning inserted belongs to the copy that consumes its result, or else to the copy that produced
    its operand. It belongs to no copy if several copies of one repeat consume its result; or if it redistributes, for
    the rest of the program, a result of the last copy that other copies pass to the next copy.
    """
    finder = _ShareFinder(plan, repeats)
    shares: dict[tuple[int, int], list[tuple[int, Operation]]] = defaultdict(list)
    for operation in plan.graph.operations:
        place = finder.place(operation)
        if place is not None:
            shares[place.repeat, place.copy].append((place.position, operation))
    return {key: tuple(share) for key, share in shares.items()}


class _ShareFinder:
    def __init__(self, plan: PlanData, repeats: Sequence[Repeat]) -> None:
        self.repeats = repeats
        self.program = plan.request.graph.producers
        self.made, self.users = plan.graph.producers, plan.graph.consumers
        self.places = {
            value: Place(index, number, position)
            for index, repeat in enumerate(repeats)
            for number, copy in enumerate(repeat.copies)
            for position, operation in enumerate(copy)
            for value in operation.tensors
        }

    def place(self, operation: Operation) -> Place | None:
        """The place of an operation of the plan; None if it belongs to no copy."""
        if not operation.tensors:
            return None
        if operation.tensors[0] in self.program:
            return self.places.get(operation.tensors[0])
        takers = [place for place in self.takers(operation) if place is not None]
        if takers:
            copies = {place.copy for place in takers if place.repeat == takers[0].repeat}
            return takers[0] if len(copies) == 1 else None
        return self.giver(operation)

    def takers(self, operation: Operation) -> Iterator[Place | None]:
        """The places of the program's operations that consume the results of an inserted one."""
        for user in (user for value in operation.tensors for user in self.users.get(value, ())):
            if user.tensors and user.tensors[0] not in self.program:
                yield from self.takers(user)
            else:
                yield self.place(user)

    def giver(self, operation: Operation) -> Place | None:
        """The place of the program's operation that produced what an inserted one redistributes."""
        value = operation.tensors[0]
        while value in self.made and value not in self.program:
            if not self.made[value].operands:
                return None
            value = self.made[value].operands[0]
        place = self.places.get(value)
        if place is None:
            return None
        handed_on = place.position, self.made[value].tensors.index(value)
        return None if handed_on in self.repeats[place.repeat].handed_on else place
