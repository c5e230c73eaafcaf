"""Calls of `torch.nn.init`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from proofs.nn_sweep.call import Call, call
from proofs.nn_sweep.draws import real
from proofs.nn_sweep.subjects import Make


def _filled(fill: Callable[..., torch.Tensor], *rest: Any, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: fill(x.detach().clone(), *rest, **options)


def _calls(name: str, shapes: Sequence[Sequence[int]], *rest: Any, **options: Any) -> list[Make]:
    function = _filled(getattr(nn.init, name), *rest, **options)

    def make(shape: Sequence[int]) -> Make:
        return lambda: call(function, real(*shape))

    return [make(shape) for shape in shapes]


def _module(make: Callable[[], nn.Module]) -> Make:
    """A call of a module's own initialisers."""

    def reset(*tensors: torch.Tensor) -> list[torch.Tensor]:
        module = make()
        for (name, _), tensor in zip(list(module.named_parameters()), tensors, strict=True):
            setattr(module, name, nn.Parameter(tensor.detach().clone()))
        module.reset_parameters()  # type: ignore[operator]
        return [parameter.detach() for parameter in module.parameters()]

    return lambda: Call(reset, tuple(parameter.detach() for parameter in make().parameters()))


_MATRICES = ((6, 5), (8, 4))
_OF_WEIGHTS = ("uniform_", "normal_", "trunc_normal_", "ones_", "zeros_", "xavier_uniform_", "xavier_normal_",
               "kaiming_uniform_", "kaiming_normal_", "orthogonal_")  # fmt: skip

CALLS: Mapping[str, Sequence[Make]] = MappingProxyType(
    {
        **{f"nn.init.{name}": _calls(name, (*_MATRICES, (6, 4, 3))) for name in _OF_WEIGHTS},
        "nn.init.constant_": _calls("constant_", _MATRICES, 0.3),
        "nn.init.eye_": _calls("eye_", _MATRICES),
        "nn.init.dirac_": [*_calls("dirac_", ((6, 4, 3), (4, 6, 3, 3))), *_calls("dirac_", ((6, 4, 3),), 2)],
        "nn.init.sparse_": _calls("sparse_", _MATRICES, 0.4),
        "nn.Linear.reset_parameters": [_module(lambda: nn.Linear(5, 6))],
        "nn.Conv2d.reset_parameters": [_module(lambda: nn.Conv2d(4, 6, 3))],
        "nn.Embedding.reset_parameters": [_module(lambda: nn.Embedding(9, 6))],
        "nn.LSTM.reset_parameters": [_module(lambda: nn.LSTM(4, 6))],
    }
)
"""The calls by full name."""

NOT_CALLED: Mapping[str, str] = MappingProxyType({})
