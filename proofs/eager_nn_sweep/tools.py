"""Calls of `torch.nn.utils`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, rnn

from proofs.nn_sweep.call import call
from proofs.nn_sweep.draws import real
from proofs.nn_sweep.subjects import Make

_Tensor = torch.Tensor


def _linear(weight: _Tensor, bias: _Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
    return layer


def _on_layer(change: Callable[[nn.Linear], Any]) -> list[Make]:
    """A layer that is changed, and trained for a step."""

    def run(weight: _Tensor, bias: _Tensor, x: _Tensor) -> list[_Tensor]:
        layer = _linear(weight, bias)
        changed = change(layer)
        layer = changed if isinstance(changed, nn.Linear) else layer
        result = layer(x)
        result.square().sum().backward()
        parameters = [parameter for parameter in layer.parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        torch.optim.SGD(layer.parameters(), 0.1).step()
        with torch.no_grad():
            again = layer(x)
        return [result.detach(), *(found for found in gradients if found is not None), *parameters, again]

    return [lambda: call(run, real(6, 5), real(6), real(4, 5))]


def _with_gradients(change: Callable[[list[nn.Parameter]], Any]) -> list[Make]:
    def run(*tensors: _Tensor) -> list[_Tensor]:
        parameters = [nn.Parameter(tensor.detach().clone()) for tensor in tensors]
        for parameter in parameters:
            parameter.grad = parameter.detach() * 3
        found = change(parameters)
        return [*([found] if isinstance(found, _Tensor) else []), *(p.grad for p in parameters if p.grad is not None)]

    return [lambda: call(run, real(6, 5), real(7)), lambda: call(run, real(8))]


def _clip_with_norm(parameters: list[nn.Parameter]) -> None:
    total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, 1.0, total)


def _vectors(*tensors: _Tensor) -> list[_Tensor]:
    parameters = [nn.Parameter(tensor.detach().clone()) for tensor in tensors]
    vector = nn.utils.parameters_to_vector(parameters)
    nn.utils.vector_to_parameters(vector * 2, parameters)
    return [vector, *parameters]


def _packed(x: _Tensor) -> list[_Tensor]:
    lengths = [6, 4, 4, 1, 1]
    packed = rnn.pack_padded_sequence(x, lengths, batch_first=True)  # type: ignore[arg-type]
    padded, _ = rnn.pad_packed_sequence(packed, batch_first=True)
    return [packed.data, padded]


def _network(kind: Callable[..., nn.Module], lengths: Sequence[int], *, sort: bool) -> Callable[..., list[_Tensor]]:
    def run(x: _Tensor, *weights: _Tensor) -> list[_Tensor]:
        network = kind(4, 3, batch_first=True)
        for (name, _), weight in zip(list(network.named_parameters()), weights, strict=True):
            setattr(network, name, nn.Parameter(weight.detach().clone()))
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=not sort)  # type: ignore[arg-type]
        output, state = network(packed)
        padded, _ = rnn.pad_packed_sequence(output, batch_first=True)
        padded.square().sum().backward()
        states = state if isinstance(state, tuple) else (state,)
        return [
            padded.detach(),
            *(one.detach() for one in states),
            *(p.grad for p in network.parameters() if p.grad is not None),
        ]

    return run


def _packed_network(kind: Callable[..., nn.Module]) -> list[Make]:
    shapes = [parameter.shape for parameter in kind(4, 3).parameters()]
    return [
        lambda: call(_network(kind, [6, 4, 4, 1, 1], sort=False), real(5, 6, 4), *(real(*s) for s in shapes)),
        lambda: call(_network(kind, [1, 4, 6, 1, 4], sort=True), real(5, 6, 4), *(real(*s) for s in shapes)),
    ]


def _of_sequences(function: Callable[..., Any]) -> list[Make]:
    return [lambda: call(lambda *parts: function(list(parts)), real(6, 4), real(4, 4), real(1, 4))]


def _unpadded(*parts: _Tensor) -> list[_Tensor]:
    padded = rnn.pad_sequence(list(parts), batch_first=True)
    return rnn.unpad_sequence(padded, torch.tensor([6, 4, 1]), batch_first=True)


def _unpacked(*parts: _Tensor) -> list[_Tensor]:
    return rnn.unpack_sequence(rnn.pack_sequence(list(parts)))


class _Doubled(nn.Module):
    def forward(self, x: _Tensor) -> _Tensor:
        return 2 * x


def _registered(layer: nn.Linear) -> None:
    parametrize.register_parametrization(layer, "weight", _Doubled())
    assert parametrize.is_parametrized(layer)


def _removed(layer: nn.Linear) -> None:
    _registered(layer)
    parametrize.remove_parametrizations(layer, "weight")


def _cached(layer: nn.Linear) -> None:
    _registered(layer)
    with parametrize.cached():
        assert layer.weight is layer.weight


def _transferred(layer: nn.Linear) -> nn.Linear:
    _registered(layer)
    other = _linear(layer.parametrizations.weight.original, layer.bias)  # type: ignore[union-attr,arg-type]
    parametrize.transfer_parametrizations_and_params(layer, other)
    return other


def _pruned(how: Callable[[nn.Linear], Any]) -> Callable[[nn.Linear], Any]:
    def change(layer: nn.Linear) -> None:
        how(layer)
        assert prune.is_pruned(layer)

    return change


def _unpruned(layer: nn.Linear) -> None:
    prune.l1_unstructured(layer, "weight", 0.3)
    prune.remove(layer, "weight")


def _masked(layer: nn.Linear) -> None:
    prune.custom_from_mask(layer, "weight", (layer.weight > 0).detach())


def _globally(layer: nn.Linear) -> None:
    prune.global_unstructured([(layer, "weight"), (layer, "bias")], prune.L1Unstructured, amount=0.3)


def _fused(weight: _Tensor, bias: _Tensor, mean: _Tensor, variance: _Tensor) -> list[_Tensor]:
    found = nn.utils.fuse_linear_bn_weights(
        nn.Parameter(weight.detach()), nn.Parameter(bias.detach()), mean, variance.abs(), 1e-5, mean + 1, mean
    )
    return list(found)


def _fused_convolution(weight: _Tensor, bias: _Tensor, mean: _Tensor, variance: _Tensor) -> list[_Tensor]:
    found = nn.utils.fuse_conv_bn_weights(
        nn.Parameter(weight.detach()), nn.Parameter(bias.detach()), mean, variance.abs(), 1e-5, mean + 1, mean
    )
    return list(found)


def _fused_modules(weight: _Tensor, bias: _Tensor, mean: _Tensor) -> list[_Tensor]:
    norm = nn.BatchNorm1d(6).double().eval()
    norm.weight, norm.bias = nn.Parameter(mean.detach() + 1), nn.Parameter(mean.detach())
    norm.running_mean, norm.running_var = mean.detach().clone(), mean.detach().abs() + 1
    return list(nn.utils.fuse_linear_bn_eval(_linear(weight, bias).eval(), norm).parameters())


def _skipped(weight: _Tensor) -> _Tensor:
    layer = nn.utils.skip_init(nn.Linear, 5, 6, bias=False)
    layer.weight = nn.Parameter(weight.detach())
    return layer.weight * 2


def _memory_format(dims: int) -> list[Make]:
    def run(weight: _Tensor) -> _Tensor:
        layer = getattr(nn, f"Conv{dims}d")(4, 6, 3, bias=False)
        layer.weight = nn.Parameter(weight.detach().clone())
        layouts = {2: torch.channels_last, 3: torch.channels_last_3d}
        getattr(nn.utils, f"convert_conv{dims}d_weight_memory_format")(layer, layouts[dims])
        return layer.weight.detach()  # type: ignore[no-any-return]

    return [lambda: call(run, real(6, 4, *(3,) * dims))]


def _weight_norm_removed(layer: nn.Linear) -> None:
    nn.utils.weight_norm(layer)
    nn.utils.remove_weight_norm(layer)


def _spectral_norm_removed(layer: nn.Linear) -> None:
    parametrizations.spectral_norm(layer)
    parametrize.remove_parametrizations(layer, "weight")


CALLS: Mapping[str, Sequence[Make]] = MappingProxyType(
    {
        "nn.utils.clip_grad_norm_": [
            *_with_gradients(lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0)),
            *_with_gradients(lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0, float("inf"), foreach=True)),
        ],
        "nn.utils.clip_grad_value_": _with_gradients(lambda parameters: nn.utils.clip_grad_value_(parameters, 0.5)),
        "nn.utils.clip_grads_with_norm_": _with_gradients(_clip_with_norm),
        "nn.utils.get_total_norm": _with_gradients(nn.utils.get_total_norm),
        "nn.utils.parameters_to_vector": [
            lambda: call(lambda *parts: nn.utils.parameters_to_vector(parts), real(6, 5), real(7)),
        ],
        "nn.utils.vector_to_parameters": [lambda: call(_vectors, real(8), real(4, 3))],
        "nn.utils.weight_norm": _on_layer(nn.utils.weight_norm),
        "nn.utils.remove_weight_norm": _on_layer(_weight_norm_removed),
        "nn.utils.spectral_norm": _on_layer(nn.utils.spectral_norm),
        "nn.utils.skip_init": [lambda: call(_skipped, real(6, 5))],
        "nn.utils.fuse_linear_bn_weights": [lambda: call(_fused, real(6, 5), real(6), real(6), real(6))],
        "nn.utils.fuse_conv_bn_weights": [
            lambda: call(_fused_convolution, real(6, 4, 3), real(6), real(6), real(6)),
        ],
        "nn.utils.fuse_linear_bn_eval": [lambda: call(_fused_modules, real(6, 5), real(6), real(6))],
        "nn.utils.convert_conv2d_weight_memory_format": _memory_format(2),
        "nn.utils.convert_conv3d_weight_memory_format": _memory_format(3),
        "nn.utils.parametrizations.weight_norm": _on_layer(parametrizations.weight_norm),
        "nn.utils.parametrizations.spectral_norm": [
            *_on_layer(parametrizations.spectral_norm),
            *_on_layer(_spectral_norm_removed),
        ],
        "nn.utils.parametrizations.orthogonal": [
            *_on_layer(parametrizations.orthogonal),
            *_on_layer(lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley")),
            *_on_layer(lambda layer: parametrizations.orthogonal(layer, orthogonal_map="householder")),
        ],
        "nn.utils.parametrize.register_parametrization": _on_layer(_registered),
        "nn.utils.parametrize.remove_parametrizations": _on_layer(_removed),
        "nn.utils.parametrize.cached": _on_layer(_cached),
        "nn.utils.parametrize.transfer_parametrizations_and_params": _on_layer(_transferred),
        "nn.utils.prune.identity": _on_layer(_pruned(lambda layer: prune.identity(layer, "weight"))),
        "nn.utils.prune.random_unstructured": _on_layer(
            _pruned(lambda layer: prune.random_unstructured(layer, "weight", 0.3))
        ),
        "nn.utils.prune.l1_unstructured": _on_layer(_pruned(lambda layer: prune.l1_unstructured(layer, "weight", 0.3))),
        "nn.utils.prune.random_structured": _on_layer(
            _pruned(lambda layer: prune.random_structured(layer, "weight", 0.3, 0))
        ),
        "nn.utils.prune.ln_structured": _on_layer(
            _pruned(lambda layer: prune.ln_structured(layer, "weight", 0.3, 2, 0))
        ),
        "nn.utils.prune.global_unstructured": _on_layer(_pruned(_globally)),
        "nn.utils.prune.custom_from_mask": _on_layer(_pruned(_masked)),
        "nn.utils.prune.remove": _on_layer(_unpruned),
        "nn.utils.rnn.pack_padded_sequence": [
            lambda: call(_packed, real(5, 6, 4)),
            *(make for kind in (nn.LSTM, nn.GRU, nn.RNN) for make in _packed_network(kind)),
        ],
        "nn.utils.rnn.pad_packed_sequence": [lambda: call(_packed, real(5, 6, 3))],
        "nn.utils.rnn.pad_sequence": _of_sequences(rnn.pad_sequence),
        "nn.utils.rnn.unpad_sequence": [lambda: call(_unpadded, real(6, 4), real(4, 4), real(1, 4))],
        "nn.utils.rnn.pack_sequence": _of_sequences(rnn.pack_sequence),
        "nn.utils.rnn.unpack_sequence": [lambda: call(_unpacked, real(6, 4), real(4, 4), real(1, 4))],
    }
)
"""The calls by full name."""

NOT_CALLED: Mapping[str, str] = MappingProxyType(
    {
        "nn.utils.clip_grad_norm": "deprecated name of clip_grad_norm_",
        "nn.utils.fuse_conv_bn_eval": "as fuse_linear_bn_eval, by fuse_conv_bn_weights",
        "nn.utils.parametrize.is_parametrized": "no tensors: called by register_parametrization's call",
        "nn.utils.parametrize.type_before_parametrizations": "no tensors",
        "nn.utils.prune.is_pruned": "no tensors: called by the calls of other functions",
        "nn.utils.remove_spectral_norm": "for a module in evaluation, as remove_parametrizations",
        "nn.utils.rnn.invert_permutation": "of plain indices: called by pack_padded_sequence",
    }
)
