"""Functions from tensors to tensors, and their transforms, which are such functions again.

Derivatives are written once, for functions that are planned as programs (`planned_function`) and for those that run
uncompiled (`spmd.api.uncompiled.whole_function`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from typing_extensions import Self

from spmd.core.mesh import Mesh

Flat = Callable[..., Sequence[torch.Tensor]]
"""A function from tensors to tensors."""

_InSpec = TypeVar("_InSpec")
_OutSpec = TypeVar("_OutSpec")


class FlatFunction(ABC, Generic[_InSpec, _OutSpec]):
    """A flat function, the specs of its arguments, and its transforms, each made once.

    Args:
        function: the function.
        mesh: the mesh.
        in_specs: the spec of every argument.
        plain: the numbers of the results that are plain tensors, replicated: gradients of plain arguments.
    """

    residuals: Sequence[Any] = ()
    """The values that a call returns after its results; only `SavesResiduals` has any."""

    def __init__(self, function: Flat, mesh: Mesh, in_specs: Sequence[_InSpec], plain: Sequence[int]) -> None:
        self.function, self.mesh, self.in_specs, self.plain = function, mesh, tuple(in_specs), tuple(plain)
        self.pullback, self.pushforward = functools.cache(self._pullback), functools.cache(self._pushforward)
        self.batched = functools.cache(self._batched)

    @property
    @abstractmethod
    def is_random(self) -> bool:
        """True if it may draw random numbers."""

    @abstractmethod
    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it on plain tensors and DTensors, on which no transform acts."""

    def saving(self, wanted: tuple[int, ...], plain: tuple[int, ...]) -> Any:
        """The function where autograd wants gradients of arguments; those of the arguments `plain` are plain."""
        return self

    @abstractmethod
    def cotangent_specs(self, results: Sequence[int]) -> list[_InSpec]:
        """The specs of the cotangents of some results: theirs, with nothing pending."""

    @abstractmethod
    def input_tangent_specs(self, arguments: Sequence[int]) -> list[_InSpec]:
        """The specs of the tangents of some arguments: theirs, with nothing pending."""

    @abstractmethod
    def tangent_specs(self, results: Sequence[int]) -> list[_OutSpec]:
        """The specs of the tangents of some results."""

    @abstractmethod
    def gradient_specs(self, arguments: Sequence[int], plain: Sequence[int]) -> list[_OutSpec]:
        """The specs of the gradients of some arguments, of which some are plain."""

    @abstractmethod
    def derived(
        self,
        function: Flat,
        in_specs: Sequence[_InSpec],
        out_specs: Sequence[_OutSpec],
        name: str,
        plain: Sequence[int],
    ) -> Self:
        """A transform of this function."""

    @abstractmethod
    def _batched(
        self, in_dims: tuple[int | None, ...], size: int, randomness: str, axes: tuple[tuple[str, ...], ...]
    ) -> Self:
        """The function over a batch; every result has it in dim 0.

        Args:
            in_dims: the batch dim of each argument; None for one that is the same for the whole batch.
            size: its length.
            randomness: as for `torch.func.vmap`.
            axes: for each argument, the mesh axes that shard its batch dim.
        """

    def over_batch(self, in_dims: tuple[int | None, ...], randomness: str) -> Flat:
        """The function over a batch, for tensors."""
        return torch.func.vmap(lambda *leaves: tuple(self.function(*leaves)), in_dims, 0, randomness)

    def _pullback(self, wanted: tuple[int, ...], given: tuple[int, ...], plain: tuple[int, ...]) -> Self:
        """From arguments and cotangents of the results `given` to the gradients of the arguments `wanted`."""
        return self.derived(
            lambda *tensors: self.vjp(wanted, given, tensors)[1],
            (*self.in_specs, *self.cotangent_specs(given)),
            self.gradient_specs(wanted, plain),
            "pullback",
            positions(wanted, plain),
        )

    def _pushforward(self, given: tuple[int, ...], wanted: tuple[int, ...]) -> Self:
        """From arguments and tangents of the arguments `given` to the tangents of the results `wanted`."""

        def function(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            primals, tangents = tensors[: len(self.in_specs)], tensors[len(self.in_specs) :]

            def differentiated(*some: torch.Tensor) -> Sequence[torch.Tensor]:
                results = self.function(*replaced(primals, given, some))
                return tuple(results[number] for number in wanted)

            moved = tuple(primals[number] for number in given)
            return torch.func.jvp(differentiated, moved, tuple(tangents))[1]  # type: ignore[no-any-return]

        in_specs = (*self.in_specs, *self.input_tangent_specs(given))
        return self.derived(
            function, in_specs, self.tangent_specs(wanted), "pushforward", positions(wanted, self.plain)
        )

    def vjp(
        self, wanted: Sequence[int], given: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """All results, and the gradients of the arguments `wanted`.

        Args:
            wanted: the numbers of arguments.
            given: the numbers of the results that have cotangents.
            tensors: the arguments, and the cotangents.
        """
        primals, cotangents = tensors[: len(self.in_specs)], tensors[len(self.in_specs) :]

        def differentiated(*some: torch.Tensor) -> Any:
            results = self.function(*replaced(primals, wanted, some))
            return tuple(results[number] for number in given), tuple(results)

        made: Any = torch.func.vjp(differentiated, *(primals[n] for n in wanted), has_aux=True)
        _, pull, results = made
        return results, pull(tuple(cotangents))


def positions(numbers: Sequence[int], some: Sequence[int]) -> tuple[int, ...]:
    """The positions of some numbers among numbers."""
    return tuple(position for position, number in enumerate(numbers) if number in some)


def replaced(values: Iterable[Any], numbers: Iterable[int], others: Iterable[Any]) -> list[Any]:
    """Some values, with others in the places that have these numbers."""
    found = list(values)
    for number, other in zip(numbers, others, strict=True):
        found[number] = other
    return found
