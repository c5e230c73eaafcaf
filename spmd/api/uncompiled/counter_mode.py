"""Functions that run uncompiled with `rng="counter"`: torch's random operators draw what programs draw."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from spmd.ir.random_operators import is_random
from spmd.tracing.counter_draws import drawn
from spmd.tracing.draw_scopes import draw_scope, drawing_by, seed_key
from spmd.tracing.effects import Generators, noticing


class _ByKeys(TorchDispatchMode):
    """Computes random operators of this thread by the keys of its scope."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, scope = kwargs or {}, draw_scope()
        if scope is not None and is_random(func, args, kwargs):
            result = drawn(func, args, kwargs, scope)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def drawing_by_counter(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose random operators draw by keys of a seed, which torch's generator draws at each call."""

    @functools.wraps(function)
    def drawing(*args: Any, **kwargs: Any) -> Any:
        generators = Generators()
        with drawing_by(seed_key()), noticing(generators), _ByKeys():
            result = function(*args, **kwargs)
            generators.refuse_changes()
        return result

    return drawing


class RankDraws:
    """The draws of ranks in one process: each goes on from where the function around them is."""

    def __init__(self) -> None:
        self._scope = draw_scope()
        self._start = None if self._scope is None else self._scope.position

    @contextlib.contextmanager
    def on_rank(self) -> Iterator[None]:
        """A context in which a rank runs; behind the last one the function goes on where they are, all at one place."""
        if self._scope is None or self._start is None:
            yield
            return
        key, count = self._start
        with drawing_by(key, count) as scope, _ByKeys():
            yield
        self._scope.restore(scope.position)
