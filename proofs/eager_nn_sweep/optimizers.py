"""Calls of `torch.optim`: two steps on two parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from proofs.nn_sweep.call import call
from proofs.nn_sweep.draws import real
from proofs.nn_sweep.subjects import Make

_Optimizer = Callable[..., torch.optim.Optimizer]


def _steps(make: _Optimizer, **options: Any) -> Callable[..., list[torch.Tensor]]:
    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values, gradients = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        parameters = [nn.Parameter(value.detach().clone()) for value in values]
        optimizer = make(parameters, **options)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            total = sum(((p - g.detach()) ** 2).sum() for p, g in zip(parameters, gradients, strict=True))
            assert isinstance(total, torch.Tensor)
            total.backward()
            return total

        for _ in range(2):
            optimizer.step(loss)  # type: ignore[arg-type]
        optimizer.load_state_dict(optimizer.state_dict())
        return [parameter.detach() for parameter in parameters]

    return run


def _calls(
    make: _Optimizer, *options: Mapping[str, Any], shapes: Sequence[Sequence[int]] = ((6, 5), (7,))
) -> list[Make]:
    def of(given: Mapping[str, Any]) -> Make:
        return lambda: call(_steps(make, **given), *(real(*shape) for shape in (*shapes, *shapes)))

    return [of(given) for given in ({}, {"weight_decay": 0.1}, *options)]


_FOREACH = {"foreach": True}
_FUSED = {"fused": True}

CALLS: Mapping[str, Sequence[Make]] = MappingProxyType(
    {
        "optim.SGD": _calls(torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, _FOREACH, _FUSED, {"maximize": True}),
        "optim.Adam": _calls(torch.optim.Adam, {"amsgrad": True}, _FOREACH, _FUSED, {"lr": torch.tensor(0.1)}),
        "optim.AdamW": _calls(torch.optim.AdamW, {"amsgrad": True}, _FOREACH, _FUSED),
        "optim.Adagrad": _calls(torch.optim.Adagrad, {"lr_decay": 0.1}, _FOREACH, _FUSED),
        "optim.Adadelta": _calls(torch.optim.Adadelta, _FOREACH),
        "optim.Adafactor": _calls(torch.optim.Adafactor, _FOREACH),
        "optim.Adamax": _calls(torch.optim.Adamax, _FOREACH),
        "optim.ASGD": _calls(torch.optim.ASGD, _FOREACH),
        "optim.LBFGS": [
            lambda: call(_steps(torch.optim.LBFGS, max_iter=3), real(6, 5), real(7), real(6, 5), real(7)),
            lambda: call(
                _steps(torch.optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe"), *(real(6, 5), real(6, 5))
            ),
        ],
        "optim.Muon": _calls(
            partial(torch.optim.Muon, lr=1e-5, ns_steps=1), {"nesterov": False}, shapes=((6, 5), (4, 8))
        ),
        "optim.NAdam": _calls(torch.optim.NAdam, _FOREACH, {"decoupled_weight_decay": True}),
        "optim.RAdam": _calls(torch.optim.RAdam, _FOREACH, {"decoupled_weight_decay": True}),
        "optim.RMSprop": _calls(torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, _FOREACH),
        "optim.Rprop": [
            lambda: call(_steps(torch.optim.Rprop), real(6, 5), real(7), real(6, 5), real(7)),
            lambda: call(_steps(torch.optim.Rprop, foreach=True), real(6, 5), real(7), real(6, 5), real(7)),
        ],
    }
)
"""The calls by full name."""

NOT_CALLED: Mapping[str, str] = MappingProxyType({"optim.SparseAdam": "for sparse gradients, which DTensors have not"})
