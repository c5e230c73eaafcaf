"""Checks that all processes of a job do the same: one small collective that compares them before larger ones run."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from spmd.collectives.distributed.process_groups import group_for
from spmd.core.mesh import Mesh, Runtime
from spmd.core.spec import TensorMeta
from spmd.errors import DivergenceError, SpmdError
from spmd.job.collective_scope import CollectiveScope, who_says_what

WHOLE = 1 << 24
"""Tensors of up to this many bytes are compared in full, larger ones by samples."""

BLOCKS, BLOCK = 256, 1 << 16
"""The samples of a large tensor: the number of evenly spaced blocks, and the bytes of each."""


def spans_processes(mesh: Mesh) -> bool:
    """Whether the mesh spans several processes, which then have to agree."""
    return mesh.runtime is Runtime.DISTRIBUTED and mesh.size > 1


def gather(call: str, value: Any) -> list[Any]:
    """An all_gather of Python values: those of all processes in rank order, on every process.

    Args:
        call: the user's call that needs this, as text; it must be the same on all ranks, and is compared too.
        value: the value of this process; anything that can be pickled.

    Raises:
        DivergenceError: on every rank, if ranks make different calls.
        SpmdError: a rank failed in the call, or never reaches it.
    """
    every: list[tuple[str, Any]] = [(call, value)] * dist.get_world_size()
    if len(every) == 1:
        return [value]
    group = group_for("comparisons")
    with CollectiveScope(f"the comparison of ranks in {call}", range(len(every))):
        if not _are_equal(pickle.dumps((call, value)), group):
            dist.all_gather_object(every, (call, value), group=group)
    failures = [
        f"Rank {rank} failed in {given}: {value.text}"
        for rank, (given, value) in enumerate(every)
        if isinstance(value, _Failure)
    ]
    if failures:
        raise known(SpmdError("\n".join(failures)))
    calls = [given for given, _ in every]
    if len(set(calls)) > 1:
        raise known(
            DivergenceError(
                f"Ranks make different calls: {who_says_what(dict(enumerate(calls)))}. All ranks must make the same "
                "calls, in the same order, on the same mesh."
            )
        )
    return [given for _, given in every]


def known(error: SpmdError) -> SpmdError:
    """The error, marked as one that all ranks know of: none of them reports it to the others."""
    error.on_all_ranks = True
    return error


def _are_equal(mine: bytes, group: dist.ProcessGroup) -> bool:
    """Whether the bytes are the same on every process, by their digests."""
    digest = torch.frombuffer(bytearray(hashlib.sha256(mine).digest()), dtype=torch.uint8)
    every = [torch.empty_like(digest) for _ in range(group.size())]
    dist.all_gather(every, digest, group=group)
    return all(digest.equal(other) for other in every)


@attrs.frozen
class _Failure:
    """The value that a process gathers if it failed in the call."""

    text: str


@contextmanager
def failing_together(call: str, active: bool = True) -> Iterator[None]:
    """A context for the local part of a call, before its first collective: an error on one rank reaches all ranks.

    A rank that fails reports its error through `gather`, and raises it; the others raise a SpmdError in the `gather` or
    `check_agreement` that must follow the block, or is in it.

    Args:
        call: as for `gather`.
        active: whether there are other ranks; if not, the context does nothing.
    """
    try:
        yield
    except Exception as error:
        if active and not (isinstance(error, SpmdError) and error.on_all_ranks):
            with suppress(SpmdError):  # that of `gather`; this rank raises its own error
                gather(call, _Failure(f"{type(error).__name__}: {error}"))
        raise


def check_agreement(call: str, claims: Mapping[str, str], expected: str) -> None:
    """Check that all processes describe the same things in the same way.

    Args:
        call: as for `gather`.
        claims: the description of each thing, by its name. Of a description with many lines, the error shows the first
            line that differs.
        expected: what is expected of all ranks and what to do, for the message.

    Raises:
        DivergenceError: on every rank, if they differ; with the first difference, and which ranks say what.
        SpmdError: a rank failed in the call, or never reaches it.
    """
    # A digest and not the claims: they may be long, and equal ones need not be pickled into equal bytes.
    said = hashlib.sha256(repr(list(claims.items())).encode()).digest()
    if len(set(gather(call, said))) == 1:
        return
    every: list[dict[str, str]] = gather(call, dict(claims))
    for name in dict.fromkeys(name for given in every for name in given):
        texts = [given.get(name, "nothing") for given in every]
        if len(set(texts)) > 1:
            where, lines = _first_difference(texts)
            raise DivergenceError(
                f"{name} differs between ranks{where}: {who_says_what(dict(enumerate(lines)))}. {expected}"
            )


def _first_difference(texts: Sequence[str]) -> tuple[str, list[str]]:
    """Where texts first differ, and what they say there; texts of one line are shown in full."""
    rows = list(itertools.zip_longest(*(text.splitlines() for text in texts), fillvalue="nothing"))
    if len(rows) < 2:
        return "", list(texts)
    number, row = next((number, row) for number, row in enumerate(rows, start=1) if len(set(row)) > 1)
    return f" in line {number}", [line.strip() for line in row]


def describe(value: Any) -> str:
    """The meta of a tensor and a digest of its bytes; of anything else, its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_meta or value.layout is not torch.strided:
        return f"{TensorMeta.of(value)} ({'meta' if value.is_meta else value.layout})"
    return f"{TensorMeta.of(value)} with digest {digest(value)}"


def digest(value: Tensor) -> str:
    """A digest of the elements of a dense tensor, in eight hexadecimal digits; above `WHOLE` bytes, of samples."""
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    if flat.numel() > WHOLE:
        stride = (flat.numel() - BLOCK) // (BLOCKS - 1)
        flat = flat.as_strided((BLOCKS, BLOCK), (stride, 1)).reshape(-1)
    flat = flat.cpu()
    found = hashlib.blake2b(digest_size=4)
    if flat.numel():  # by address, because numpy is no dependency
        found.update((ctypes.c_char * flat.numel()).from_address(flat.data_ptr()))
    return found.hexdigest()
