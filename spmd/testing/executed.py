"""Records the collectives that a rank runs, by a `TorchDispatchMode`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.collectives.primitive import Collective
from spmd.collectives.primitives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, KINDS, PERMUTE, REDUCE_SCATTER
from spmd.core.mesh import Mesh
from spmd.ir.comm import Comm

_c10d = torch.ops._c10d_functional


@attrs.frozen(order=True)
class Executed:
    """One collective: its kind, the number of ranks, and the most bytes that any rank sends by the ring algorithm."""

    kind: str
    ranks: int
    bytes: float

    @classmethod
    def of_plan(cls, comms: Iterable[Comm], mesh: Mesh) -> list[Executed]:
        """What runs for the collectives of a plan, without their order in loops."""
        launches: dict[int, list[Comm]] = defaultdict(list)
        for comm in comms:
            launches[comm.launch].append(comm)
        return [cls._of_launch(joined, mesh) for joined in launches.values() for _ in range(joined[0].times)]

    @classmethod
    def _of_launch(cls, joined: Sequence[Comm], mesh: Mesh) -> Executed:
        """One run of a launch; on processors a reduce_scatter may be an all_to_all."""
        ranks = mesh.axis_size(joined[0].axes)
        collective = KINDS[joined[0].kind]
        sent_as = ALL_TO_ALL if collective.in_parts(mesh.device.type, ranks) else collective
        return cls(sent_as.kind, ranks, sum(comm.bytes_of_a_run for comm in joined))


def _by_ring(collective: Collective, x: torch.Tensor, ranks: int) -> Executed:
    return Executed(collective.kind, ranks, collective.ring_bytes(ranks, x.nbytes))


def _all_reduce(x: torch.Tensor, ranks: int, *args: Any) -> Executed:
    """Its blocks may be uneven."""
    return Executed(ALL_REDUCE.kind, ranks, ALL_REDUCE.most_bytes_sent((ranks,), tuple(x.shape), x.itemsize))


def _exchange(x: torch.Tensor, ranks: int, received: Sequence[int], sent: Sequence[int], group: str) -> Executed:
    is_permute = all(sum(map(bool, sizes)) <= 1 for sizes in (received, sent))
    return _by_ring(PERMUTE if is_permute else ALL_TO_ALL, x, ranks)


_CALLED: Mapping[Any, Callable[..., Executed]] = MappingProxyType(
    {
        _c10d.all_reduce.default: _all_reduce,
        _c10d.all_reduce_.default: _all_reduce,
        _c10d.all_gather_into_tensor_out.default: lambda x, ranks, *_: _by_ring(ALL_GATHER, x, ranks),
        _c10d.reduce_scatter_tensor.default: lambda x, ranks, *_: _by_ring(REDUCE_SCATTER, x, ranks),
        _c10d.all_to_all_single.default: _exchange,
    }
)
"""By torch's operator, what a call of it is, of its tensor, the number of ranks and its other arguments."""


class ExecutedCollectives(TorchDispatchMode):
    """Records the functional collectives of torch that run inside the `with` block, in order, in `found`.

    An all_to_all in which this rank sends to at most one rank, and receives from at most one, counts as a permute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Executed] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CALLED:
            x, *rest = args
            ranks = torch.distributed.distributed_c10d._resolve_process_group(rest[-1]).size()
            self.found.append(_CALLED[func](x, ranks, *rest))
        return func(*args, **(kwargs or {}))
