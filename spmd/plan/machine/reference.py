"""Reference programs, by which measured rates become those of operators among others.

The same operator run again and again finds its operands in caches, and for its result the memory that was just freed.
In a program it finds neither: on processors, fresh pages alone can take a third of the time. So each rate is divided
by what the references take over what the rates predict for them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from spmd.plan.machine.roofline import Roofline
from spmd.plan.machine.transcendentals import evaluations

_CPU, _ACCELERATOR = (8, 64, 256), (8, 1024, 2048)
"""Sequences, tokens of each, and width."""

_HEAD = 32
"""The width of a head."""

_ROWS, _WIDTH, _LAYERS = 64, 512, 12
"""Rows and width of products, and how many follow each other: their weights do not fit into a core's cache."""


def references(device: torch.device) -> Sequence[Callable[[], object]]:
    """A block of a transformer and, on processors, products of few rows, as in small batches."""
    return (_block(device), _products_of_few_rows()) if device.type == "cpu" else (_block(device),)


def orders(device: torch.device) -> tuple[int, int]:
    """Orders of square matrices: of a product that is short beside a collective, and of one that shows the rate."""
    return (128, 256) if device.type == "cpu" else (512, 4096)


def small_product(device: torch.device) -> Callable[[], object]:
    """A product of matrices that is short beside a collective."""
    return product(device, orders(device)[0])


def product(device: torch.device, order: int, dtype: torch.dtype = torch.float32) -> Callable[[], object]:
    """A product of square matrices."""
    matrix = torch.ones(order, order, dtype=dtype, device=device)
    return functools.partial(torch.mm, matrix, matrix)


def _block(device: torch.device) -> Callable[[], torch.Tensor]:
    """One block of a transformer, without gradients."""
    sequences, tokens, width = _CPU if device.type == "cpu" else _ACCELERATOR
    x = _normal(sequences, tokens, width, device=device)
    square, up = (_normal(rows, width, device=device) / math.sqrt(width) for rows in (width, 4 * width))
    down = up.t().contiguous()

    def heads(y: torch.Tensor) -> torch.Tensor:
        return y.view(sequences, tokens, -1, _HEAD).transpose(1, 2)

    def block() -> torch.Tensor:
        y = F.layer_norm(x, (width,))
        q, k, v = (heads(F.linear(y, square)) for _ in range(3))
        attention = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(_HEAD), dim=-1)
        z = x + F.linear((attention @ v).transpose(1, 2).reshape(x.shape), square)
        return z + F.linear(F.gelu(F.linear(F.layer_norm(z, (width,)), up)), down)

    return block


def _products_of_few_rows() -> Callable[[], list[torch.Tensor]]:
    """Layers and their gradients, where weights are much of what is read and written."""
    x = _normal(_ROWS, _WIDTH) / math.sqrt(_WIDTH)
    weights = [_normal(_WIDTH, _WIDTH) / math.sqrt(_WIDTH) for _ in range(_LAYERS)]

    def products() -> list[torch.Tensor]:
        y, gradients = x, []
        for weight in weights:
            y = F.linear(y, weight)
        for weight in reversed(weights):
            gradients.append(y.t() @ x)
            y = y @ weight
        return gradients

    return products


def _normal(*size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Normal numbers of a generator of their own: the default one has the numbers of the user's program."""
    return torch.randn(*size, device=device, generator=torch.Generator(device).manual_seed(0))


def predicted_seconds(run: Callable[[], object], roofline: Roofline, latency: float) -> float:
    """What the operators of a function take, by a roofline, if each takes `latency` seconds besides."""
    operators = _Operators(roofline, latency)
    with operators:
        run()
    return operators.seconds


class _Operators(TorchDispatchMode):
    """Adds up the predicted seconds of operators that are no views."""

    def __init__(self, roofline: Roofline, latency: float) -> None:
        super().__init__()
        self.seconds = 0.0
        self._roofline, self._latency = roofline, latency

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            traffic = self._roofline.traffic(_nbytes(args), _nbytes(result))
            count = flop_registry.get(func.overloadpacket)
            work = count(*args, **(kwargs or {}), out_val=result) if count else 0.0
            each = evaluations(func, kwargs or {})
            evaluated = each * result.numel() if each else 0.0
            self.seconds += self._latency + self._roofline.seconds(work, traffic, evaluated)
        return result


def _nbytes(tree: Any) -> int:
    """The bytes of all tensors in a tree."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
