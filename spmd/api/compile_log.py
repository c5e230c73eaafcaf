"""`log_compiles`: which functions are compiled, and what is new about the call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from spmd.api.signature import Signature
from spmd.api.values.leaves import DYNAMIC
from spmd.core.static_key import static_text
from spmd.tracing.source import user_source, where

_logger = logging.getLogger("spmd")
_logs: ContextVar[bool] = ContextVar("spmd_log_compiles", default=False)


@contextlib.contextmanager
def log_compiles() -> Iterator[None]:
    """Log each compilation of a jitted function in the `with` block, with its reason; as `jax.log_compiles`.

    Messages go to the logger `"spmd"`, as warnings, so that they show by default. The reason is what differs from the
    call whose program was used last: the shape, dtype or spec of an argument, a static argument, the structure of the
    arguments, the mesh, torch's settings, or what the function reads beside its arguments.

    >>> import torch
    >>> from spmd import P, jit, make_mesh
    >>> double = jit(lambda x: 2 * x, P("data"), mesh=make_mesh({"data": 2}, runtime="virtual"))
    >>> with log_compiles():
    ...     x = double(torch.ones(4))
    """
    token = _logs.set(True)
    try:
        yield
    finally:
        _logs.reset(token)


def log_compile(name: str, signature: Signature, last: Signature | None, changes: Iterable[str] = ()) -> None:
    """Log that a function is compiled, under `log_compiles`.

    Args:
        name: the function.
        signature: that of the call.
        last: that of its last program.
        changes: what it reads beside its arguments and has changed since, in words.
    """
    if _logs.get():
        reasons = [] if last is None else [*_differences(signature, last), *changes]
        reason = "it was not called before" if last is None else "; ".join(reasons)
        _logger.warning("Compiling %s at %s: %s.", name, where(user_source()), reason)


def log_taken(name: str, taken: Sequence[tuple[str, str]]) -> None:
    """Log which parts of a function's result take the specs of which arguments, under `log_compiles`."""
    if _logs.get() and taken:
        texts = [f"{part} has the specs of {argument}" for part, argument in taken]
        _logger.warning(
            "%s is compiled without out_specs at %s: %s. out_specs=spmd.FREE leaves them to the planner.",
            name,
            where(user_source()),
            ", ".join(texts),
        )


def log_reused(name: str, counts: Mapping[str, int]) -> None:
    """Log how often layers were not traced again, by the names of their classes, under `log_compiles`."""
    if _logs.get() and counts:
        texts = (f"{count} of {layer}" for layer, count in counts.items())
        _logger.warning("%s calls the programs of equal layers: %s.", name, ", ".join(texts))


def _differences(new: Signature, old: Signature) -> Iterator[str]:
    """What tells two signatures apart, in words."""
    if new.mesh != old.mesh:
        yield f"it runs on {new.mesh}, and ran on {old.mesh}"
    if new.settings != old.settings:
        yield "torch's settings differ (autocast, default dtype, modes, ...)"
    if new.layout != old.layout:
        yield f"it has the arguments {', '.join(new.layout.labels)}, and had {', '.join(old.layout.labels)}"
    elif new.static != old.static:
        for (number, key), (_, before) in zip(new.static, old.static, strict=True):
            if key != before:
                label = new.layout.labels[number]
                yield f"static argument {label} is {static_text(key)}, and was {static_text(before)}"
    if new.tree != old.tree:
        yield f"the structure of the arguments is {new.tree}, and was {old.tree}"
        return
    for (position, key), (place, before) in zip(new.others, old.others, strict=False):
        if (position, key) != (place, before):
            yield f"argument {new.paths[position]} is {_text(key)}, and argument {new.paths[place]} was {_text(before)}"
    if len(new.others) != len(old.others):
        yield "other arguments are tensors"
        return
    for path, *leaves in zip(new.tensors(new.paths), new.metas, old.metas, new.own, old.own, strict=True):
        meta, meta_before, own, own_before = leaves
        if (meta, own) != (meta_before, own_before):
            yield f"argument {path} is {own or meta}, and was {own_before or meta_before}"


def _text(key: Any) -> str:
    return key if key == DYNAMIC else static_text(key)
