"""A block exchange between processes: one all_to_all with exact sizes over the processes of both meshes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spmd.collectives.block_exchange import Block, BlockExchange
from spmd.collectives.transport.process_groups import group_among
from spmd.collectives.transport.transport_dtypes import moved
from spmd.job import device_watch
from spmd.job.collective_scope import CollectiveScope
from spmd.job.process import process_index

_c10d = torch.ops._c10d_functional


def exchange_blocks(exchange: BlockExchange, shard: Tensor | None) -> Tensor | None:
    """This process's shard of the target: `start_exchange`, and the wait for it."""
    return start_exchange(exchange, shard)()


def start_exchange(exchange: BlockExchange, shard: Tensor | None, cause: str = "") -> Callable[[], Tensor | None]:
    """Start an exchange; a collective call of the processes of both meshes, if they communicate.

    Args:
        exchange: the exchange.
        shard: the shard of the source; None if this process is not in its mesh.
        cause: the user's call and where it is, for messages.

    Returns:
        A function that waits for this process's shard of the target and returns it, or None if the process is not in
        the target's mesh; it is to be called once. It and this function raise a SpmdError if a process is missing.
    """
    me = process_index()
    values: dict[Block, Tensor] = {}
    if shard is not None:
        own = [block for block in exchange.received_by(me) if block.sender == me]
        values = {block: exchange.taken(shard, block) for block in own}
    receive = _start(exchange, shard, me, cause) if exchange.is_collective else dict

    def finish() -> Tensor | None:
        values.update(receive())
        return exchange.assembled(me, values) if me in exchange.target.mesh.ranks else None

    return finish


def _start(exchange: BlockExchange, shard: Tensor | None, me: int, cause: str) -> Callable[[], dict[Block, Tensor]]:
    """Send blocks; the function that is returned waits for those that other processes send to this one."""
    processes, wire = exchange.processes, moved(exchange.source.meta.dtype)
    group = group_among(processes, exchange.source.mesh)
    sent = exchange.sent_by(me)
    received = sorted(
        (block for block in exchange.received_by(me) if block.sender != me), key=lambda block: block.sender
    )
    sends, receives = dict.fromkeys(processes, 0), dict.fromkeys(processes, 0)
    for block in sent:
        sends[block.receiver] += block.numel * wire.factor
    for block in received:
        receives[block.sender] += block.numel * wire.factor
    flat = [exchange.taken(shard, block).reshape(-1) for block in sent] if shard is not None else []
    empty = torch.empty(0, dtype=exchange.source.meta.dtype, device=exchange.source.mesh.device)
    packed = wire.encode(torch.cat([empty, *flat]).resolve_conj().resolve_neg())
    del flat  # its copies are not held while the result is allocated
    scope = CollectiveScope(f"{exchange}{cause and f' ({cause})'}", processes, processes)
    with scope:
        sizes = list(receives.values()), list(sends.values())
        pending = _c10d.all_to_all_single.default(packed, *sizes, group.group_name)

    def finish() -> dict[Block, Tensor]:
        with scope:
            buffer = _c10d.wait_tensor.default(pending)
        if buffer.is_cuda:
            device_watch.note(scope)
        values = wire.decode(buffer).view(-1).split([block.numel for block in received])
        return {
            block: value.view([stop - start for start, stop in block.box])
            for block, value in zip(received, values, strict=True)
        }

    return finish
