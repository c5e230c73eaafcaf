"""Embedding, also with its vocabulary sharded (as in Megatron-LM, arXiv:1909.08053)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spmd.collectives import shard_offset
from spmd.core.placement import Partial, Replicate, Shard
from spmd.ir.call import Call
from spmd.rules.notation import by_call, factors
from spmd.rules.ops.lookup import filled, local_index, look_up_rows, missing, shard_starts
from spmd.rules.partial import carry, linear
from spmd.rules.rule import Axes, Row, Rule, table

aten = torch.ops.aten


def _lookup(axes: Axes, call: Call, weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    starts = shard_starts(indices, call.operands[0].shape[0], axes, look_up_rows)
    local, held = local_index(indices, starts, weight.shape[0])
    rows = aten.embedding.default(filled(weight, 0), local)
    return torch.where(held.unsqueeze(-1), rows, missing(rows))


def _lookup_backward(
    axes: Axes, call: Call, grad: Tensor, indices: Tensor, count: int, padding_idx: int, by_frequency: bool
) -> Tensor:
    length = call.results[0].shape[0]
    local, held = local_index(indices, shard_offset(count, axes), length)
    held = held & (indices != padding_idx)
    # Gradients of rows in other shards, and of padding, go into an extra last row, which is then dropped.
    local = torch.where(held, local, torch.full_like(local, length))
    return aten.embedding_dense_backward.default(grad, local, length + 1, -1, by_frequency).narrow(0, 0, length)


def _cut_vocabulary(_: Call) -> Iterator[Row]:
    yield Row((Shard(0), Replicate()), (Partial("sum"),), _lookup)


def _cut_vocabulary_backward(_: Call) -> Iterator[Row]:
    yield Row((Replicate(), Replicate()), (Shard(0),), _lookup_backward)


def _embedding_backward(call: Call) -> Rule:
    fixed = "... v" if call.argument("scale_grad_by_freq") else "v"
    rows = (linear("grad_output"), _cut_vocabulary_backward)
    return factors("... d, ... -> v d", *rows, sum="...", replicate=fixed)


EMBEDDING = table({
    "embedding": factors("v d, ... -> ... d", carry("weight"), _cut_vocabulary, replicate="v"),
    "embedding_dense_backward": by_call(_embedding_backward),
})  # fmt: skip
