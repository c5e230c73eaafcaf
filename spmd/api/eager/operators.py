"""What is known of an operator from its name and its schema."""

from __future__ import annotations

import functools

import torch

aten = torch.ops.aten


def name_of(op: torch._ops.OpOverload) -> str:
    """The name of an operator, or of what one that writes to its first argument does."""
    return op._schema.name.removeprefix("aten::").rstrip("_")


def is_listed(op: torch._ops.OpOverload) -> bool:
    """Whether an operator works on lists, item by item."""
    return name_of(op).startswith(("_foreach_", "_fused_"))


def is_elementwise(op: torch._ops.OpOverload) -> bool:
    """Whether an operator works on lists, item by item and element by element."""
    return name_of(op).startswith("_foreach_") and name_of(op) not in ("_foreach_norm", "_foreach_max")


def takes_any_number(op: torch._ops.OpOverload) -> bool:
    """Whether plans of an operator on complete tensors do not depend on numbers: it works element by element."""
    return is_elementwise(op) or torch.Tag.pointwise in op.tags


@functools.cache
def returns_arguments(op: torch._ops.OpOverload, *, written: bool) -> bool:
    """Whether an operator returns arguments that it wrote to; or, if not `written`, views of an argument."""
    return any(found.alias_info is not None and found.alias_info.is_write is written for found in op._schema.returns)


@functools.cache
def written_arguments(op: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """The position and the name of each argument that an operator writes to."""
    arguments = enumerate(op._schema.arguments)
    unsaid = _WRITES_UNSAID.get(op, ())
    return tuple(
        (n, a.name) for n, a in arguments if a.name in unsaid or (a.alias_info is not None and a.alias_info.is_write)
    )


@functools.cache
def overwritten_arguments(op: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """The position and the name of each argument that an operator writes to without reading it."""
    is_copy = name_of(op) in ("copy", "_foreach_copy")
    arguments = op._schema.arguments
    return tuple((n, name) for n, name in written_arguments(op) if is_copy or arguments[n].is_out)


@functools.cache
def index_arguments(op: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """The position and the name of each argument that says which elements an operator takes."""
    return tuple((n, a.name) for n, a in enumerate(op._schema.arguments) if a.name in _INDEXES)


_INDEXES = frozenset({"index", "indices", "mask", "repeats"})

_WRITES_UNSAID = {aten.native_batch_norm.default: ("running_mean", "running_var")}
"""Arguments that an operator writes to although its schema does not say so."""
