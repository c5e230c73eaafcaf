"""Checks that all processes of a mesh do the same: one small collective that compares them before larger ones run."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from spmd.collectives.distributed import replicas as held
from spmd.collectives.distributed.checksums import as_bytes, checksums
from spmd.collectives.distributed.history import History, Ran, history
from spmd.collectives.distributed.replicas import Replica
from spmd.collectives.transport.process_groups import group_for, in_rank_order
from spmd.core.mesh import Mesh, Runtime
from spmd.core.spec import TensorMeta
from spmd.errors import DivergenceError, SpmdError
from spmd.job import checks
from spmd.job.collective_scope import CollectiveScope, who_says_what
from spmd.job.user_code import user_line

WHOLE = 1 << 24
"""Tensors of up to this many bytes are compared in full, larger ones by samples."""

BLOCKS, BLOCK = 256, 1 << 16
"""The samples of a large tensor: the number of evenly spaced blocks, and the bytes of each."""


def spans_processes(mesh: Mesh) -> bool:
    """Whether the mesh spans several processes, which then have to agree.

    Raises:
        MeshError: it is distributed, and not over this process.
    """
    return mesh.runtime is Runtime.DISTRIBUTED and len(mesh.held_coordinates) < mesh.size


def gather(call: str, value: Any, ranks: Sequence[int]) -> list[Any]:
    """An all_gather of Python values: those of some processes, on each of them.

    Ranks compare beside them which programs they have run so far (`history`), and how much they check.

    Args:
        call: the user's call that needs this, as text; it must be the same on all ranks, and is compared too.
        value: the value of this process; anything that can be pickled.
        ranks: the processes, in the order of the result: `mesh.ranks`.

    Raises:
        DivergenceError: on every rank, if ranks make different calls, or have run different programs.
        SpmdError: a rank failed in the call, or never reaches it.
    """
    return _gather(call, value, ranks, None, ())[0]


def gather_with_replicas(
    call: str, value: Any, mesh: Mesh, replicas: Sequence[Replica]
) -> tuple[list[Any], str | None]:
    """As `gather` among the ranks of a mesh, and compare what they hold alike.

    Args:
        call, value: as for `gather`.
        mesh: the mesh.
        replicas: those of this process, of which all ranks have the same names and axes.

    Returns:
        The values, and where the calls are and what differs between replicas; None if nothing does.
    """
    return _gather(call, value, mesh.ranks, mesh, replicas)


def _gather(
    call: str, value: Any, ranks: Sequence[int], mesh: Mesh | None, replicas: Sequence[Replica]
) -> tuple[list[Any], str | None]:
    if len(ranks) == 1:
        return [value], None
    group, past = group_for("comparisons", ranks), history(ranks)
    with CollectiveScope(f"the comparison of ranks in {call}", ranks):
        if _are_equal((call, value, checks.every_call, past.mark), mesh, replicas, group, ranks):
            return [value] * len(ranks), None
        mine = _Said(call, value, checks.every_call, past.ran, tuple(replicas), user_line())
        found: list[_Said] = [mine] * len(ranks)
        dist.all_gather_object(found, mine, group=group)
    every = dict(zip(ranks, in_rank_order(found, ranks), strict=True))
    _refuse_other_calls(every, past)
    different = None if mesh is None else held.difference(mesh, [said.replicas for said in every.values()])
    lines = places({rank: said.line for rank, said in every.items()})
    return [said.value for said in every.values()], different and f"at {lines}: {different}"


@attrs.frozen
class _Said:
    """What a process says to the others in a call: the arguments of `gather`, and where it is."""

    call: str
    value: Any
    checks_every_call: bool
    ran: Ran
    replicas: tuple[Replica, ...]
    line: str


def _are_equal(
    said: object, mesh: Mesh | None, replicas: Sequence[Replica], group: dist.ProcessGroup, ranks: Sequence[int]
) -> bool:
    """Whether all processes say the same, and those that must hold alike do, by their digests."""
    digests = [held.digest_of(pickle.dumps(said)), *(held.digests_along(mesh, replicas) if mesh else ())]
    row = b"".join(digests).ljust((1 + held.slots(group.size())) * held.WIDTH, b"\0")  # as long on all ranks
    every = [torch.empty(len(row), dtype=torch.uint8) for _ in range(group.size())]
    dist.all_gather(every, torch.frombuffer(bytearray(row), dtype=torch.uint8), group=group)
    table = torch.stack(in_rank_order(every, ranks)).view(len(every), -1, held.WIDTH)
    if not torch.equal(table[:, 0], table[:1, 0].expand_as(table[:, 0])):
        return False
    return mesh is None or held.are_equal_along(mesh, table[:, 1:])


def _refuse_other_calls(every: Mapping[int, _Said], past: History) -> None:
    """Raise an error if a rank failed, or if ranks make different calls or have run different programs."""
    failures = [
        f"Rank {rank} failed in {said.call}: {said.value.text}"
        for rank, said in every.items()
        if isinstance(said.value, _Failure)
    ]
    if failures:
        raise known(SpmdError("\n".join(failures)))
    lines = f"They are at {places({rank: said.line for rank, said in every.items()})}."
    calls = {rank: said.call for rank, said in every.items()}
    checked = {rank: repr(checks.CALLS if said.checks_every_call else checks.FIRST) for rank, said in every.items()}
    if not _all_equal(checked.values()):
        message = (
            f"Ranks check different calls: check is {who_says_what(checked)}. {lines} Give all ranks the same "
            f"spmd.init(check=...), or the same {checks.VARIABLE}."
        )
    elif not _all_equal(calls.values()):
        message = (
            f"Ranks make different calls: {who_says_what(calls)}. {lines} All ranks must make the same calls, in the "
            "same order, on the same mesh."
        )
    elif not _all_equal(said.ran for said in every.values()):
        ran = {rank: said.ran for rank, said in every.items()}
        message = (
            f"Ranks have run different programs: {past.difference(ran)}. {lines} They were compared in "
            f"{next(iter(calls.values()))}. All ranks must make the same calls, in the same order; "
            f"{checks.VARIABLE}={checks.CALLS} finds the first that differs, before it runs."
        )
    else:
        return
    past.forget()  # all ranks know
    raise known(DivergenceError(message))


def places(lines: Mapping[int, str]) -> str:
    """Where processes are, by their numbers: one line, if all are there."""
    return next(iter(lines.values())) if _all_equal(lines.values()) else who_says_what(lines)


def _all_equal(values: Iterable[Any]) -> bool:
    first, *others = values
    return all(first == other for other in others)


def known(error: SpmdError) -> SpmdError:
    """The error, marked as one that all ranks know of: none of them reports it to the others."""
    error.on_all_ranks = True
    return error


@attrs.frozen
class _Failure:
    """The value that a process gathers if it failed in the call."""

    text: str


@contextmanager
def failing_together(call: str, mesh: Mesh, active: bool = True) -> Iterator[None]:
    """A context for the local part of a call, before its first collective: an error on one rank reaches all ranks.

    A rank that fails reports its error through `gather`, and raises it; the others raise a SpmdError in the `gather` or
    `check_agreement` that must follow the block, or is in it.

    Args:
        call: as for `gather`.
        mesh: the mesh whose ranks make the call.
        active: whether a comparison follows; if not, or if the mesh has no other processes, the context does nothing.

    Raises:
        MeshError: the mesh is distributed, and not over this process.
    """
    active = spans_processes(mesh) and active
    try:
        yield
    except Exception as error:
        if active and not (isinstance(error, SpmdError) and error.on_all_ranks):
            with suppress(SpmdError):  # that of `gather`; this rank raises its own error
                gather(call, _Failure(f"{type(error).__name__}: {error}"), mesh.ranks)
        raise


def check_agreement(call: str, claims: Mapping[str, str], expected: str, ranks: Sequence[int]) -> None:
    """Check that all processes describe the same things in the same way.

    Args:
        call: as for `gather`.
        claims: the description of each thing, by its name. Of a description with many lines, the error shows the first
            line that differs.
        expected: what is expected of all ranks and what to do, for the message.
        ranks: as for `gather`.

    Raises:
        DivergenceError: on every rank, if they differ; with the first difference, and which ranks say what.
        SpmdError: a rank failed in the call, or never reaches it.
    """
    # A digest and not the claims: they may be long, and equal ones need not be pickled into equal bytes.
    if _all_equal(gather(call, held.digest_of(repr(list(claims.items()))), ranks)):
        return
    if found := difference(dict(zip(ranks, gather(call, dict(claims), ranks), strict=True))):
        raise DivergenceError(f"{found}. {expected}")


def difference(every: Mapping[int, Mapping[str, str]]) -> str | None:
    """The first thing that processes describe in different ways, and which ranks say what; None if there is none."""
    for name in dict.fromkeys(name for given in every.values() for name in given):
        texts = [given.get(name, "nothing") for given in every.values()]
        if len(set(texts)) > 1:
            where, lines = _first_difference(texts)
            return f"{name} differs between ranks{where}: {who_says_what(dict(zip(every, lines, strict=True)))}"
    return None


def _first_difference(texts: Sequence[str]) -> tuple[str, list[str]]:
    """Where texts first differ, and what they say there; texts of one line are shown in full."""
    rows = list(itertools.zip_longest(*(text.splitlines() for text in texts), fillvalue="nothing"))
    if len(rows) < 2:
        return "", list(texts)
    number, row = next((number, row) for number, row in enumerate(rows, start=1) if len(set(row)) > 1)
    return f" in line {number}", [line.strip() for line in row]


def describe(value: Any) -> str:
    """The meta of a tensor and a digest of its bytes; a number; of anything else, its type."""
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, float) else type(value).__name__
    if value.is_meta or value.layout is not torch.strided:
        return f"{TensorMeta.of(value)} ({'meta' if value.is_meta else value.layout})"
    return f"{TensorMeta.of(value)} with digest {digest(value)}"


def digest(value: Tensor) -> str:
    """A digest of the elements of a dense tensor, in eight hexadecimal digits; above `WHOLE` bytes, of samples."""
    flat = as_bytes(value)
    if flat.numel() > WHOLE:
        stride = (flat.numel() - BLOCK) // (BLOCKS - 1)
        flat = flat.as_strided((BLOCKS, BLOCK), (stride, 1))
    return f"{checksums([flat])[0] & 0xFFFFFFFF:08x}"
