"""Embedding, also with its vocabulary sharded (as in Megatron-LM, arXiv:1909.08053)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from spmd.placement import Partial, Replicate, Shard
from spmd.rules.lookup import filled, local_index
from spmd.rules.notation import factors
from spmd.rules.partial import carry, linear
from spmd.rules.rule import Call, Factors, Row, Rule

aten = torch.ops.aten


def _lookup(
    axes: tuple[str, ...],
    call: Call,
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    local, held = local_index(indices, call.operands[0].shape[0], weight.shape[0], axes)
    found = aten.embedding.default(filled(weight, 0), local)
    return torch.where(held.unsqueeze(-1), found, torch.zeros_like(found))


def _lookup_backward(
    axes: tuple[str, ...],
    call: Call,
    grad: torch.Tensor,
    indices: torch.Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> torch.Tensor:
    length = call.results[0].shape[0]
    local, held = local_index(indices, num_weights, length, axes)
    held = held & (indices != padding_idx)
    # Rows of other shards, and padding, are added to one row more, which is then dropped.
    local = torch.where(held, local, torch.full_like(local, length))
    summed = aten.embedding_dense_backward.default(grad, local, length + 1, -1, scale_grad_by_freq)
    return summed.narrow(0, 0, length)


def _cut_vocabulary(_: Call) -> Iterator[Row]:
    yield Row((Shard(0), Replicate()), (Partial("sum"),), _lookup)


def _cut_vocabulary_backward(_: Call) -> Iterator[Row]:
    yield Row((Replicate(), Replicate()), (Shard(0),), _lookup_backward)


_BACKWARD = factors("... d, ... -> v d", linear("grad_output"), _cut_vocabulary_backward, sum="...", replicate="v")
_BACKWARD_BY_FREQUENCY = factors(
    "... d, ... -> v d", linear("grad_output"), _cut_vocabulary_backward, replicate="... v"
)


def _embedding_backward(call: Call) -> Factors:
    return (_BACKWARD_BY_FREQUENCY if call.argument("scale_grad_by_freq") else _BACKWARD).factorize(call)


EMBEDDING: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.embedding.default: factors("v d, ... -> ... d", carry("weight"), _cut_vocabulary, replicate="v"),
        aten.embedding_dense_backward.default: Rule(_embedding_backward),
    }
)
