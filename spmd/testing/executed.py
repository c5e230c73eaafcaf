"""Records the collectives that a rank runs, by a `TorchDispatchMode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.collectives.bytes_sent import max_bytes_sent
from spmd.collectives.distributed.exchange import is_sent_in_parts
from spmd.collectives.traffic import ring_bytes
from spmd.core.mesh import Mesh
from spmd.ir.comm import Comm, StepKind

_c10d = torch.ops._c10d_functional

_KINDS: Mapping[Any, StepKind] = MappingProxyType(
    {
        _c10d.all_reduce.default: StepKind.ALL_REDUCE,
        _c10d.all_reduce_.default: StepKind.ALL_REDUCE,
        _c10d.all_gather_into_tensor_out.default: StepKind.ALL_GATHER,
        _c10d.reduce_scatter_tensor.default: StepKind.REDUCE_SCATTER,
        _c10d.all_to_all_single.default: StepKind.ALL_TO_ALL,
    }
)


@attrs.frozen(order=True)
class Executed:
    """One collective: its kind, the number of ranks, and the most bytes that any rank sends by the ring algorithm."""

    kind: StepKind
    ranks: int
    bytes: float

    @classmethod
    def of_launch(cls, joined: Sequence[Comm], mesh: Mesh) -> Executed:
        """What runs for the collectives of a launch of a plan; on processors a reduce_scatter may be an all_to_all."""
        kind, ranks = joined[0].kind, mesh.axis_size(joined[0].axes)
        if kind is StepKind.REDUCE_SCATTER and is_sent_in_parts(mesh.device.type, ranks):
            kind = StepKind.ALL_TO_ALL
        return cls(kind, ranks, sum(comm.bytes for comm in joined))


class ExecutedCollectives(TorchDispatchMode):
    """Records the functional collectives of torch that run inside the `with` block, in order, in `found`.

    An all_to_all in which this rank sends to at most one rank, and receives from at most one, counts as a permute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Executed] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KINDS:
            self.found.append(_executed(_KINDS[func], args))
        return func(*args, **(kwargs or {}))


def _executed(kind: StepKind, args: tuple[Any, ...]) -> Executed:
    ranks = torch.distributed.distributed_c10d._resolve_process_group(args[-1]).size()
    nbytes = args[0].nbytes * (ranks if kind is StepKind.ALL_GATHER else 1)
    if kind is StepKind.ALL_TO_ALL and all(sum(map(bool, splits)) <= 1 for splits in args[1:3]):
        kind = StepKind.PERMUTE
    if kind is StepKind.ALL_REDUCE:
        return Executed(kind, ranks, max_bytes_sent(kind, (ranks,), tuple(args[0].shape), args[0].itemsize, ()))
    return Executed(kind, ranks, ring_bytes(kind, ranks, nbytes))
