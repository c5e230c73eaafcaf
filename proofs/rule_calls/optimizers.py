"""Small calls of torch's fused optimizers: lists have one element, as in plans."""

from __future__ import annotations

from typing import Any

import torch

from proofs.rule_calls.draws import Calls, Draws, call

aten = torch.ops.aten
_draws = Draws(0)
f = _draws.f

ADAM = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6, "amsgrad": False, "maximize": False}
SGD = {"weight_decay": 0.1, "momentum": 0.9}
SGD_FLAGS = {"dampening": 0.0, "nesterov": True, "maximize": False, "is_first_step": False}


def adam(rate: Any, *shape: int) -> Calls:
    lists = [f(*shape)], [f(*shape)], [f(*shape)], [f(*shape).square()]
    return [call(*lists, [], [torch.tensor(3.0)], lr=rate, **ADAM)]


def sgd(rate: Any, *shape: int) -> Calls:
    return [call([f(*shape)], [f(*shape)], [f(*shape)], **SGD, lr=rate, **SGD_FLAGS)]


OPTIMIZERS = {
    getattr(packet, overload): [*make(rate, 4, 5), *make(rate, 3)]
    for packet, make in ((aten._fused_adam, adam), (aten._fused_adamw, adam), (aten._fused_sgd, sgd))
    for overload, rate in (("default", 0.1), ("tensor_lr", torch.tensor(0.1)))
}
