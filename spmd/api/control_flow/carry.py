"""What a loop carries from trip to trip: its structure, shapes and dtypes are the same in every trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import attrs
import optree
import torch
from torch import Tensor

from spmd.api.control_flow.leaves import WEAK, Leaves, as_tensor, difference, have, leaves_of
from spmd.api.control_flow.place import in_program
from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.runtime.torch_settings import default_generator_state, set_default_generator_state
from spmd.tracing.source import where

T = TypeVar("T")


@attrs.frozen(eq=False)
class Carry:
    """The values that the first trip of a loop gets.

    Args:
        call: the loop, for messages: `spmd.scan`.
        function: the function of a trip, for messages: `f`.
        structure: of the tree of values.
        values: its leaves, as tensors.
        weak: which leaves the user has given as Python's numbers, and no trip has given a dtype.
    """

    call: str
    function: str
    structure: optree.PyTreeSpec
    values: tuple[Tensor, ...]
    weak: tuple[bool, ...]

    @classmethod
    def of(cls, init: Leaves, call: str, function: str, device: torch.device | None) -> Carry:
        """The carry that begins with a tree's leaves."""
        weak = tuple(isinstance(value, WEAK) and not isinstance(value, bool) for value in init.values)
        return cls(call, function, init.structure, tuple(init.tensors(device)), weak)

    def tree(self, values: Sequence[Tensor]) -> Any:
        """The tree of a trip's values."""
        return self.structure.unflatten(values)

    def next(self, tree: Any) -> list[Tensor]:
        """The values for the next trip, of what the function has returned.

        Raises:
            TraceError: their structure, shapes or dtypes are not those of the first trip.
            _PromotionError: a number must have another dtype from the first trip on.
        """
        name = f"the carry that {self.function} returns"
        found = leaves_of(tree, self.call, name)
        if found.structure != self.structure:
            returned, given = difference(found.metas(None), Leaves(self._metas, self.structure)) or ("", "")
            raise TraceError(
                f"{self.call} at {where()}: {name} has another structure than the one it gets: {returned}, where it "
                f"gets {given}. {_FIXPOINT}"
            )
        values = [as_tensor(value, old.device) for value, old in zip(found.values, self.values, strict=True)]
        if not have(values, self._metas):
            raise _PromotionError([self._dtype(number, value) for number, value in enumerate(values)])
        return values

    def promoted(self, dtypes: Sequence[torch.dtype]) -> Carry:
        """The carry with other dtypes of its numbers, which stay from now on."""
        pairs = list(zip(self.values, dtypes, strict=True))
        return attrs.evolve(
            self,
            values=tuple(value.to(dtype) for value, dtype in pairs),
            weak=tuple(weak and value.dtype == dtype for weak, (value, dtype) in zip(self.weak, pairs, strict=True)),
        )

    @cached_property
    def _metas(self) -> tuple[TensorMeta, ...]:
        return tuple(map(TensorMeta.of, self.values))

    def _dtype(self, number: int, value: Tensor) -> torch.dtype:
        """The dtype of a leaf in all trips; TraceError if a trip changes it, or its shape."""
        old, new = self._metas[number], TensorMeta.of(value)
        if self.weak[number] and old.shape == new.shape and _kind(old.dtype) <= _kind(new.dtype):
            return new.dtype
        if old != new:
            path = self.structure.accessors()[number].codify("")
            cast = f"; here .to({new.dtype}) of what it begins with, or .to({old.dtype}) of what comes back"
            raise TraceError(
                f"{self.call} at {where()}: carry{path} is {old} when {self.function} gets it, and {new} when it "
                f"returns it. {_FIXPOINT[:-1]}{cast if old.dtype != new.dtype else ''}."
            )
        return old.dtype


def settled(carry: Carry, run: Callable[[Carry], T]) -> T:
    """Run a loop, from its start again where a number turns out to need another dtype, as JAX traces it again."""
    values = not in_program() and any(carry.weak)
    device = carry.values[carry.weak.index(True)].device if values else torch.device("cpu")
    state = default_generator_state(device) if values else None
    while True:
        try:
            return run(carry)
        except _PromotionError as error:
            carry = carry.promoted(error.dtypes)
        if state is not None:
            set_default_generator_state(state, device)


def _kind(dtype: torch.dtype) -> int:
    """The rank of a kind of numbers: a number gives way to tensors of its own kind and of higher ones."""
    return 0 if dtype is torch.bool else 1 + dtype.is_floating_point + 2 * dtype.is_complex


class _PromotionError(Exception):
    """A trip returns another dtype for a number."""

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes


_FIXPOINT = "What a loop carries keeps its structure, shapes and dtypes in every trip."
