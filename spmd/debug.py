"""Looking into programs while they run."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.collectives.callbacks import debug_callback
from spmd.collectives.host import HOST_PRINT
from spmd.core.pytree import tree_leaves
from spmd.errors import SpmdError

__all__ = ["callback", "print"]

_MOST_LAYOUTS = 1024
"""The most combinations of shardings of the values of one call among which a plan can choose."""


def print(fmt: str, *values: object, **named: object) -> None:
    """Print values when a program runs, on every rank in rank order; modelled on `jax.debug.print`.

    Inside `jit` each rank prints the shard that it holds, in the layout that the plan gives to the value: printing
    changes no sharding, and pending sums are reduced first. Inside `shard_map` each rank prints its own value. Every
    line begins with the rank, as in `[rank 0] loss 0.25`. On a distributed mesh the process of its first rank prints
    the lines of all.

    Calls print in program order, also if nothing else depends on their values. Values have no gradient here, so one
    that is differentiated can be printed, and is what it is without `grad`. Under `vmap` the whole batch is printed
    once, in dim 0. Outside of any program the values are global, and one process prints them after `[global]`.

    Args:
        fmt: as for `str.format`. A format specification applies to every element of a tensor: `"{:.3f}"`.
        values, named: what `fmt` refers to. What is no tensor is formatted when the function is traced.

    Raises:
        SpmdError: a container with tensors in it, or more tensors than one call takes.

    >>> from spmd import P, jit, make_mesh
    >>> def f(x):
    ...     print("{name} is {}", x, name="x")
    ...     return x + 1
    >>> y = jit(f, P("data"), P("data"), mesh=make_mesh({"data": 2}, runtime="virtual"))(torch.arange(4))
    [rank 0] x is tensor([0, 1])
    [rank 1] x is tensor([2, 3])
    """
    formatter = _Formatter()
    texts = formatter.vformat(fmt, values, named).split(_MARK)
    tensors, forms = formatter.tensors, formatter.forms
    _refuse_many("print", tensors)
    pieces = [texts[0]]
    for form, text in zip(forms, texts[1:], strict=True):
        pieces += form, text
    HOST_PRINT(tensors, pieces)


def callback(function: Callable[..., None], *args: object, ordered: bool = False, **kwargs: object) -> None:
    """Call a function of the host when a program runs, with values; modelled on `jax.debug.callback`.

    Every rank calls it, with what `print` would print on it: inside `jit` the shard that it holds, in the layout that
    the plan gives to the value, and inside `shard_map` its own value. On a distributed mesh each process calls it for
    its rank, and sends nothing. Tensors are copies, which the function may keep.

    Calls are made in program order, also if nothing else depends on their values. Values have no gradient here. Under
    `vmap` it is called for one example after the other. Outside of any program it is called at once.

    Args:
        function: the function, which returns None. It must not call collectives, or functions under `jit` on a mesh of
            processes.
        args, kwargs: its arguments, pytrees with tensors. What is no tensor is passed as it was when the function that
            calls `callback` was traced, but for dynamic numbers.
        ordered: for JAX's signature: calls are always in order here.

    Raises:
        SpmdError: the function returns something, or more tensors than one call takes.

    >>> from spmd import P, jit, make_mesh
    >>> shards = []
    >>> def f(x):
    ...     callback(shards.append, x)
    ...     return x + 1
    >>> y = jit(f, P("data"), P("data"), mesh=make_mesh({"data": 2}, runtime="virtual"))(torch.arange(4))
    >>> shards
    [tensor([0, 1]), tensor([2, 3])]
    """
    _refuse_many("callback", [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])
    debug_callback(function, args, kwargs)


def _refuse_many(name: str, tensors: Sequence[torch.Tensor]) -> None:
    if math.prod(1 + x.ndim for x in tensors) > _MOST_LAYOUTS:
        raise SpmdError(
            f"spmd.debug.{name} was given {len(tensors)} tensors, of {', '.join(str(x.ndim) for x in tensors)} dims. "
            "Make several calls."
        )


_MARK = "\0"
"""The place of a tensor in a text that is formatted at trace time."""


class _Formatter(string.Formatter):
    """Formats all but tensors, which it collects."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.forms: list[str] = []
        self._conversion = ""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._conversion = conversion or ""
            return value
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
            raise SpmdError(
                f"spmd.debug.print was given a {type(value).__name__} with tensors in it. Pass each of the tensors "
                "by itself."
            )
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if not isinstance(value, torch.Tensor):
            return str(super().format_field(value, format_spec))
        self.tensors.append(value)
        self.forms.append(f"{self._conversion}:{format_spec}")
        return _MARK
