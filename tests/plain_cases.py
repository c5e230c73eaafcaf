"""Calls in which torch makes plain tensors beside DTensors, as functions that worker processes import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from unittest import mock

import optree
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

import spmd
from spmd import P
from spmd.collectives.distributed import agreement

Tensors = Sequence[torch.Tensor]
Case = tuple[Callable[[], nn.Module | None], Callable[[], Tensors], Callable[..., Any]]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _attention(x: torch.Tensor, width: int, dropout: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x[..., :width], is_causal=True, dropout_p=dropout)


def _transposed_attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x.mT.contiguous(), torch.tanh(x.mT), x.mT, is_causal=True, dropout_p=0.5)


def _one_hot(labels: torch.Tensor, count: int) -> torch.Tensor:
    return F.one_hot(labels, count)


def _encode(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mask = spmd.distribute(nn.Transformer.generate_square_subsequent_mask(6), P(), x.mesh) if spmds(x) else None
    mask = nn.Transformer.generate_square_subsequent_mask(6) if mask is None else mask
    return module(x, src_mask=mask, is_causal=True)


def spmds(x: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return isinstance(x, spmd.DTensor)


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> Case:
    made = lambda: kind(4, 3, **options)  # noqa: E731
    return made, lambda: [randn(5, 2, 4)], lambda module, x: module(x)


def _function(function: Callable[..., Any], *tensors: torch.Tensor) -> Case:
    return lambda: None, lambda: tensors, lambda _, *given: function(*given)


def _sparse(x: torch.Tensor) -> torch.Tensor:
    return nn.init.sparse_(x.clone(), 0.3)


_PARTS = [torch.arange(4.0 * length).view(length, 4).cos() for length in (5, 3, 1)]


def _padded(*parts: torch.Tensor) -> list[torch.Tensor]:
    return [rnn.pad_sequence(list(parts), first, 2.0, side) for first in (False, True) for side in ("left", "right")]


def _packed(*parts: torch.Tensor) -> list[torch.Tensor]:
    packed = rnn.pack_sequence(list(parts))
    return [packed.data, packed.batch_sizes, *rnn.unpack_sequence(packed)]


def _unpadded(*parts: torch.Tensor) -> list[torch.Tensor]:
    return rnn.unpad_sequence(rnn.pad_sequence(list(parts)), torch.tensor([5, 3, 1]))


def _packed_network(kind: type[nn.RNNBase], lengths: Any, **options: Any) -> Case:
    def run(module: nn.Module, x: torch.Tensor) -> Any:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=isinstance(lengths, list))
        output, state = module(packed)
        return *rnn.pad_packed_sequence(output, batch_first=True, total_length=7), state

    return lambda: kind(4, 3, batch_first=True, **options), lambda: [randn(5, 6, 4)], run


_CHUNKS = nn.LinearCrossEntropyOptions(batch_chunk_size=2)


def _labels(x: torch.Tensor) -> torch.Tensor:
    labels = torch.tensor([0, 5, 2, 2, 1])
    return spmd.distribute(labels, P(), x.mesh) if spmds(x) else labels


def _eigenvalues(x: torch.Tensor) -> torch.Tensor:
    matrix = x[:, None] * x + torch.diag(torch.ones_like(x))
    return torch.lobpcg(matrix, k=2)[0] * x[:2]  # its first result is a plain tensor that torch wrote to


def _total(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    total += x.square().sum()
    return total


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "causal attention of another width": _function(lambda x: _attention(x, 5, 0.0), torch.ones(3, 2, 6, 8)),
        "causal attention with dropout": _function(lambda x: _attention(x, 8, 0.5), torch.ones(3, 2, 6, 8)),
        "attention of what is computed": _function(_transposed_attention, torch.ones(3, 6, 8)),
        "an encoder layer": (
            lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            lambda: [randn(5, 6, 8)],
            _encode,
        ),
        "LSTM": _recurrent(nn.LSTM, num_layers=2, dropout=0.5, bidirectional=True),
        "LSTM without bias": _recurrent(nn.LSTM, bias=False, batch_first=True),
        "GRU": _recurrent(nn.GRU, batch_first=True),
        "RNN": _recurrent(nn.RNN, bidirectional=True),
        "LSTM cell": (lambda: nn.LSTMCell(4, 3), lambda: [randn(5, 4)], lambda module, x: module(x)),
        "one_hot": _function(lambda labels: _one_hot(labels, 7), torch.arange(5)),
        "one_hot of as many as there are": _function(lambda labels: _one_hot(labels, -1), torch.arange(5)),
        "a bag of embeddings": (
            lambda: nn.EmbeddingBag(9, 6),
            lambda: [torch.arange(6).view(3, 2)],
            lambda module, x: module(x),
        ),
        "fractional pooling": (
            lambda: nn.FractionalMaxPool2d(2, output_ratio=0.5),
            lambda: [randn(3, 2, 8, 8)],
            lambda module, x: module(x),
        ),
        "sparse": _function(_sparse, torch.zeros(8, 5)),
        "a sample of a normal distribution": _function(
            lambda mean: torch.distributions.Normal(mean, mean.exp()).rsample((3,)), torch.arange(4.0)
        ),
        "padded sequences": _function(_padded, *_PARTS),
        "packed sequences": _function(_packed, *_PARTS),
        "unpadded sequences": _function(_unpadded, *_PARTS),
        "LSTM of packed sequences": _packed_network(nn.LSTM, torch.tensor([1, 4, 6, 1, 4]), num_layers=2),
        "GRU of packed sequences": _packed_network(nn.GRU, [6, 4, 4, 1, 1], bidirectional=True),
        "RNN of packed sequences": _packed_network(nn.RNN, torch.tensor([6, 4, 5, 1, 1])),
        "normalization over channels": (
            lambda: nn.CrossMapLRN2d(3),
            lambda: [randn(2, 6, 3, 4)],
            lambda module, x: module(x),
        ),
        "chunks of a loss": _function(
            lambda x, w: F.linear_cross_entropy(x, w, _labels(x), reduction="none", options=_CHUNKS),
            _PARTS[0],
            torch.arange(24.0).view(6, 4).sin(),
        ),
        "eigenvalues": _function(_eigenvalues, torch.arange(1.0, 7.0, dtype=torch.float64)),
        "a number that is added to": _function(_total, torch.arange(5.0)),
        "rows of an embedding under vmap": _function(
            torch.vmap(F.embedding), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 5, 3)
        ),
    }
)
"""Each: makes a module or None, makes its inputs, and calls it with them."""


def results(name: str, mesh: spmd.Mesh | None, shard: int = 0) -> list[torch.Tensor]:
    """The results, whole, and the gradients of parameters and inputs; on one device without a mesh."""
    make, inputs, run = CASES[name]
    torch.manual_seed(0)
    module, tensors = make(), inputs()

    def placed(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if mesh is None:
            return tensor.detach().clone()
        spec = P(*(None,) * (dim % max(tensor.ndim, 1)), mesh.names[0]) if tensor.ndim else P()
        return spmd.distribute(tensor.detach(), spec, mesh)

    for part in module.modules() if module else ():
        for key, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, key, nn.Parameter(placed(parameter, shard)))
    leaves = [placed(tensor, shard).requires_grad_(tensor.is_floating_point()) for tensor in tensors]
    torch.manual_seed(1)
    found = [leaf for leaf in optree.tree_leaves(run(module, *leaves)) if isinstance(leaf, torch.Tensor)]
    ends = [leaf for leaf in found if leaf.requires_grad]
    if ends:
        sum(end.square().sum() for end in ends).backward()
    of = [*(module.parameters() if module else ()), *leaves]
    every = [*found, *(leaf.grad for leaf in of if leaf.grad is not None)]
    return [leaf.full_tensor().detach() if isinstance(leaf, spmd.DTensor) else leaf.detach() for leaf in every]


def drawn_apart(check: str, mesh: spmd.Mesh) -> list[str]:
    """What ranks say of a sample whose numbers part at the third call of a line."""
    spmd.init(check=check)
    mean, said = spmd.distribute(torch.zeros(4), P(), mesh), []
    for number in range(3):
        torch.manual_seed(spmd.process_index() if number == 2 else 0)
        try:
            torch.distributions.Normal(mean, 1.0).rsample()
            said.append("")
        except spmd.DivergenceError as error:
            said.append(str(error))
    torch.manual_seed(spmd.process_index())
    try:
        torch.distributions.Normal(mean, 1.0).rsample()
        said.append("")
    except spmd.DivergenceError as error:
        said.append(str(error))
    spmd.init(check="first")
    return said


def comparisons(name: str, mesh: spmd.Mesh) -> list[str]:
    """The operators for which ranks compare plain tensors in the forward pass of a case."""
    calls, gather = list[str](), agreement.gather

    def noted(call: str, *args: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            calls.append(call)
        return gather(call, *args)

    spmd.init(check="calls")
    with mock.patch.object(agreement, "gather", noted):
        results(name, mesh)
    spmd.init(check="first")
    return [call for call in calls if call.startswith("aten.")]
