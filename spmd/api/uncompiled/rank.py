"""What a rank does with others, while its function runs uncompiled: on a thread beside others, or in a process."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from spmd.api.uncompiled.baton import ENDED, Baton
from spmd.collectives import virtual
from spmd.collectives.distributed import exchange
from spmd.collectives.distributed.agreement import gather, known
from spmd.collectives.distributed.printer import Printer
from spmd.collectives.host import HOST_PRINT, print_lines, text_of
from spmd.collectives.primitives import UNTYPED
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.spec import TensorMeta
from spmd.errors import DivergenceError
from spmd.ir.source import Source
from spmd.runtime.torch_settings import isolated
from spmd.tracing.source import user_source, where

_LOCAL_SIZES = frozenset({"size", "split_size", "concat_size", "shape"})
"""Arguments of primitives that may differ between ranks, whose shards may be uneven."""


@attrs.frozen(eq=False)
class _RankCall:
    """What a rank calls, and what all ranks must have in common.

    Args:
        what: what the rank does, in messages: `calls all_reduce(op='sum', axes=['x'])`.
        source: the user's line.
        op: the operator; None for an exchange of Python values.
        arguments: its arguments, or the value.
    """

    what: str
    source: str
    op: torch._ops.OpOverload | None
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.what} at {self.source}"


def _call_of(op: torch._ops.OpOverload, args: Sequence[Any], source: Source | None) -> _RankCall:
    op = UNTYPED.get(op, op)
    if op is HOST_PRINT:
        return _RankCall("calls debug.print", where(source), op, tuple(args))
    named = {argument.name: given for argument, given in zip(op._schema.arguments, args, strict=True)}
    compared = [name for name, given in named.items() if name not in _LOCAL_SIZES and not isinstance(given, Tensor)]
    shown = [f"{name}={named[name]!r}" for name in compared]
    return _RankCall(
        f"calls {op._schema.name.removeprefix('spmd::')}({', '.join(shown)})", where(source), op, tuple(args)
    )


class Rank(abc.ABC):
    """One rank of a mesh, as its running function sees it.

    Args:
        mesh: the mesh.
        coordinate: the rank's coordinate.
        caller: the user's line that calls the function, for what no line of the function calls.
    """

    def __init__(self, mesh: Mesh, coordinate: Coordinate, caller: Source | None) -> None:
        self.mesh, self.coordinate, self.caller = mesh, coordinate, caller
        self.number = mesh.rank(coordinate)

    @property
    def source(self) -> Source | None:
        """The user's line that is running."""
        return user_source() or self.caller

    @abc.abstractmethod
    def collective(self, op: torch._ops.OpOverload, args: Sequence[Any]) -> Tensor:
        """The result of a primitive that communicates, or of a print, which all ranks call together.

        Raises:
            DivergenceError: other ranks call something else, or have ended.
        """

    @abc.abstractmethod
    def gather(self, what: str, value: Any) -> list[Any]:
        """The Python values of all ranks, in rank order; `what` is what the rank does, in messages."""

    @abc.abstractmethod
    def check_runs(self) -> None:
        """End this rank's function if another rank has failed."""


class ThreadRank(Rank):
    """A rank of a virtual mesh, in a thread of its own."""

    def __init__(
        self, mesh: Mesh, coordinate: Coordinate, caller: Source | None, baton: Callable[[], Baton[Any]]
    ) -> None:
        super().__init__(mesh, coordinate, caller)
        self._baton = baton

    def collective(self, op: torch._ops.OpOverload, args: Sequence[Any]) -> Tensor:
        """As `Rank.collective`; the result is a tensor of this rank alone."""
        result: Tensor = self._baton().meet(self.number, _call_of(op, args, self.source))
        return result.clone()

    def gather(self, what: str, value: Any) -> list[Any]:
        """As `Rank.gather`."""
        found: list[Any] = self._baton().meet(self.number, _RankCall(what, where(self.source), None, (value,)))
        return found

    def check_runs(self) -> None:
        """As `Rank.check_runs`."""
        self._baton().check_runs()


def answer(mesh: Mesh, calls: Sequence[Any]) -> Sequence[Any]:
    """The answers to the calls that all ranks of a virtual mesh have made.

    Raises:
        DivergenceError: they are not the same; the message has two ranks, what each calls, and the lines.
    """
    shown = [None if call is ENDED else call.what for call in calls]
    other = next((rank for rank, what in enumerate(shown) if what != shown[0]), None)
    if other is not None:
        raise _divergence(0, calls[0], other, calls[other])
    first = calls[0]
    if first.op is None:
        return [[call.arguments[0] for call in calls]] * len(calls)
    with isolated():
        if first.op is HOST_PRINT:
            print_lines((rank, text_of(*call.arguments)) for rank, call in enumerate(calls))
            return [torch.empty(0)] * len(calls)
        try:
            return virtual.run(first.op, mesh, [(call.arguments, {}) for call in calls])
        except DivergenceError as error:
            raise DivergenceError(f"{error} Rank 0 {first}.") from None


def _divergence(rank: int, call: Any, other: int, its: Any) -> DivergenceError:
    said = [f"rank {number} {'has ended' if made is ENDED else made}" for number, made in ((rank, call), (other, its))]
    return DivergenceError(
        f"Ranks run different collectives: {said[0]}, where {said[1]}. All ranks must make the same calls in the same "
        "order: take both branches, and choose by torch.where."
    )


class ProcessRank(Rank):
    """The rank of this process on a distributed mesh; each call is compared before it is made."""

    def collective(self, op: torch._ops.OpOverload, args: Sequence[Any]) -> Tensor:
        """As `Rank.collective`."""
        call = _call_of(op, args, self.source)
        self._compare(call, None)
        if call.op is HOST_PRINT:
            values, pieces = args
            return Printer(self.mesh, self.coordinate, tuple(pieces))(*values)
        assert call.op is not None
        tensors = [given for given in args if isinstance(given, Tensor)]
        rest = tuple(args[len(tensors) :])
        run: Callable[..., Tensor] = exchange.bind(call.op, self.mesh, self.coordinate, TensorMeta.of(tensors[0]), rest)
        return run(*tensors).clone()

    def gather(self, what: str, value: Any) -> list[Any]:
        """As `Rank.gather`."""
        return self._compare(_RankCall(what, where(self.source), None, ()), value)

    def end(self) -> None:
        """Compare the end of this rank's function with what others do."""
        self._compare(ENDED, None)

    def check_runs(self) -> None:
        """Nothing: other processes are asked at the next call."""

    def _compare(self, call: Any, value: Any) -> list[Any]:
        said = (None, "") if call is ENDED else (call.what, call.source)
        with isolated(), _disable_current_modes():
            every = gather(call_name(self.mesh), (said, value), self.mesh.ranks)
        for other, (its, _) in zip(self.mesh.ranks, every, strict=True):
            if its[0] != every[0][0][0]:
                calls = [
                    ENDED if what is None else _RankCall(what, line, None, ()) for what, line in (every[0][0], its)
                ]
                raise known(_divergence(self.mesh.ranks[0], calls[0], other, calls[1]))
        return [given for _, given in every]


def call_name(mesh: Mesh) -> str:
    """The name, in messages, of what ranks of a distributed mesh compare."""
    return f"a function under spmd.disable_jit on {mesh}"
