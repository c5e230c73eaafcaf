"""Calls of recurrent networks, attention and transformers, with batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from proofs.nn_sweep.call import Call, call
from proofs.nn_sweep.draws import real

_Layer = TypeVar("_Layer", nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def _recurrent(network: Callable[..., nn.Module], *more: Mapping[str, Any]) -> list[Callable[[], Call]]:
    options: tuple[Mapping[str, Any], ...] = (
        {},
        {"batch_first": True},
        {"num_layers": 2, "bidirectional": True, "bias": False},
        {"batch_first": True, "bidirectional": True},
        *more,
    )
    return [partial(_of_five_sequences, network, given) for given in options]


def _of_five_sequences(network: Callable[..., nn.Module], options: Mapping[str, Any]) -> Call:
    """A call on five sequences; their length is two because each time step is traced into the program."""
    return call(network(4, 3, **options), real(*((5, 2) if options.get("batch_first") else (2, 5)), 4))


def _with_state(network: Callable[..., nn.Module], states: int) -> Callable[[], Call]:
    def make() -> Call:
        state = tuple(real(1, 5, 3) for _ in range(states))
        return call(network(4, 3, batch_first=True), real(5, 2, 4), state if states > 1 else state[0])

    return make


def _masks() -> tuple[torch.Tensor, torch.Tensor]:
    """A causal mask of six positions, and the padding mask of five sequences."""
    padding = torch.arange(6) >= torch.tensor([6, 4, 5, 3, 6])[:, None]
    return torch.ones(6, 6, dtype=torch.bool).triu(1), padding


def _attention(**options: Any) -> Callable[[], Call]:
    def make() -> Call:
        causal, padding = _masks()
        attention = nn.MultiheadAttention(8, 2, **options)
        query = real(5, 6, 8) if options.get("batch_first") else real(6, 5, 8)
        other = real(*query.shape[:2], options.get("kdim", 8))
        return call(attention, query, other, other.clone(), key_padding_mask=padding, attn_mask=causal)

    return make


def _attention_plain(**given: Any) -> Call:
    q = real(5, 6, 8)
    return call(nn.MultiheadAttention(8, 2, batch_first=True), q, q.clone(), q.clone(), **given)


def _layer(of: type[_Layer], **options: Any) -> _Layer:
    return of(8, 2, dim_feedforward=12, batch_first=True, **options)


def _encoder_layer(**options: Any) -> Callable[[], Call]:
    return lambda: call(_layer(nn.TransformerEncoderLayer, **options), real(5, 6, 8))


def _masked_encoder_layer() -> Call:
    causal, padding = _masks()
    layer = _layer(nn.TransformerEncoderLayer, dropout=0.1)
    return call(layer, real(5, 6, 8), src_mask=causal, src_key_padding_mask=padding)


def _causal_encoder_layer() -> Call:
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    return call(_layer(nn.TransformerEncoderLayer, dropout=0.0), real(5, 6, 8), src_mask=mask, is_causal=True)


def _encoder() -> Call:
    return call(nn.TransformerEncoder(_layer(nn.TransformerEncoderLayer), 2, nn.LayerNorm(8)), real(5, 6, 8))


def _decoder_layer() -> Call:
    causal, padding = _masks()
    layer = _layer(nn.TransformerDecoderLayer, activation="gelu")
    return call(layer, real(5, 6, 8), real(5, 6, 8), tgt_mask=causal, memory_key_padding_mask=padding)


def _decoder() -> Call:
    layer = _layer(nn.TransformerDecoderLayer, norm_first=True)
    return call(nn.TransformerDecoder(layer, 2, nn.LayerNorm(8)), real(5, 6, 8), real(5, 4, 8))


def _transformer() -> Call:
    whole = nn.Transformer(8, 2, 1, 1, 12, batch_first=True)
    return call(whole, real(5, 4, 8), real(5, 6, 8), tgt_mask=_masks()[0], tgt_is_causal=True)


CALLS: Mapping[str, Sequence[Callable[[], Call]]] = MappingProxyType(
    {
        "RNN": [*_recurrent(nn.RNN, {"nonlinearity": "relu"}), _with_state(nn.RNN, 1)],
        "GRU": [*_recurrent(nn.GRU), _with_state(nn.GRU, 1)],
        "LSTM": [*_recurrent(nn.LSTM, {"proj_size": 2, "num_layers": 2}), _with_state(nn.LSTM, 2)],
        "RNNCell": [lambda: call(nn.RNNCell(4, 3), real(5, 4), real(5, 3))],
        "GRUCell": [lambda: call(nn.GRUCell(4, 3), real(5, 4), real(5, 3))],
        "LSTMCell": [lambda: call(nn.LSTMCell(4, 3), real(5, 4), (real(5, 3), real(5, 3)))],
        "MultiheadAttention": [
            _attention(batch_first=True),
            _attention(dropout=0.2),
            _attention(batch_first=True, kdim=6, vdim=6, add_bias_kv=True, add_zero_attn=True),
            lambda: _attention_plain(need_weights=False),
            lambda: _attention_plain(average_attn_weights=False),
        ],
        "TransformerEncoderLayer": [
            _encoder_layer(),
            _encoder_layer(norm_first=True, activation="gelu", bias=False),
            _masked_encoder_layer,
            _causal_encoder_layer,
        ],
        "TransformerEncoder": [_encoder],
        "TransformerDecoderLayer": [_decoder_layer],
        "TransformerDecoder": [_decoder],
        "Transformer": [_transformer],
    }
)
"""The calls by name of the class."""
