"""Writes a draft operation by operation: those of another one, and reshards of their values."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from spmd.ir.graph import Operation, Value
from spmd.ir.markers import REDISTRIBUTE
from spmd.ir.regions import BEGINS, END, Regions
from spmd.ir.source import Source
from spmd.plan.data.assignment import States
from spmd.plan.data.draft import Draft
from spmd.rules.strategy import Strategy


class DraftWriter:
    """A draft under construction.

    Args:
        draft: the one whose operations it has.
        states: the placements of its values.
    """

    def __init__(self, draft: Draft, states: Mapping[Value, States]) -> None:
        self.states = {value: dict(each) for value, each in states.items()}
        self._draft = draft
        self._blocks = _RegionBlocks(draft.graph.regions)
        self._logical, self._options, self._pinned = dict(draft.logical), dict(draft.options), dict(draft.pinned)
        self._fused, self._latency_shares = set(draft.fused), dict(draft.latency_shares)
        self._strategies: dict[Operation, Mapping[str, Strategy]] = {}

    def place(self, operation: Operation, placed: Operation, strategies: Mapping[str, Strategy] | None) -> None:
        """Add what stands in place of an operation of the draft, with its strategies if it has any."""
        self._blocks.place(operation, placed)
        if strategies is not None:
            self._strategies[placed] = strategies
        if operation in self._options:
            self._options[placed] = self._options.pop(operation)
        if operation in self._pinned:
            self._pinned[placed] = self._pinned.pop(operation)

    def reshard(self, value: Value, held: Value, suffix: str, states: States, source: Source | None) -> Value:
        """Add a reshard of a value of the draft, or of what it was resharded to; returns the result.

        Args:
            value: the value.
            held: what is resharded.
            suffix: the end of the result's name.
            states: the placements of the result.
            source: the line of the user's code.
        """
        moved = Value(value.name + suffix, value.meta)
        self._blocks.reshard(value, Operation(REDISTRIBUTE, (held,), {}, (moved,), source))
        self.states[moved], self._logical[moved] = dict(states), self._logical[value]
        if value in self._fused:
            self._fused.add(moved)
        if value in self._latency_shares:
            self._latency_shares[moved] = self._latency_shares[value]
        return moved

    def draft(self, planned: tuple[str, ...], gap: float) -> Draft:
        """The draft, with axes that are planned, and the gap of their search."""
        return attrs.evolve(
            self._draft,
            graph=attrs.evolve(self._draft.graph, operations=self._blocks.operations),
            logical=self._logical,
            options=self._options,
            pinned=self._pinned,
            fused=frozenset(self._fused),
            latency_shares=self._latency_shares,
            states=self.states,
            strategies=self._strategies,
            planned=planned,
            gap=gap,
        )


class _RegionBlocks:
    """The operations of a program so far, those of each open loop and branch by themselves.

    Args:
        regions: of the program whose operations are placed.
    """

    def __init__(self, regions: Regions[Operation, Value]) -> None:
        self._regions = regions
        self._open: list[tuple[Operation | None, list[Operation]]] = [(None, [])]

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All of them, when nothing is open."""
        return tuple(self._open[0][1])

    def place(self, operation: Operation, placed: Operation) -> None:
        """Add what stands in place of an operation of the program."""
        if operation.op in BEGINS:
            self._open.append((operation, []))
        elif operation.op is END:
            _, inside = self._open.pop()
            self._open[-1][1].extend(inside)
        self._open[-1][1].append(placed)

    def reshard(self, value: Value, operation: Operation) -> None:
        """Add a reshard of a value of the program: in the loop or branch in which that is made, before those inside.

        So a loop around its consumer reads it moved, and moves nothing itself.
        """
        home = self._regions.begin(value)
        next(inside for begin, inside in self._open if begin is home).append(operation)
