"""Operators with side effects, as programs hold them: those that return nothing, and those that torch has a mark for.

A program knows operators by their results. So one without any, `log(Tensor x) -> ()`, stands in it as its effectful
form, `spmd_effectful::log(Tensor x) -> Tensor`, which calls it and returns an empty tensor that nothing uses. One with
results has a form too, whose effect is known here: torch's functionalization refuses what torch has marked.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.fx import node

from spmd.ir.effects import Effect, declare_effect

OpOverload = torch._ops.OpOverload

_DEFINING = threading.RLock()
_FORMS: dict[OpOverload, tuple[OpOverload, torch.library.Library]] = {}
_ORIGINALS: dict[OpOverload, OpOverload] = {}
_NOT_AT_RUN_TIME = frozenset(
    {torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._linalg_check_errors.default}
)
"""Checks of shapes and dtypes, which traces make, as shards have other shapes; and those that `spmd` leaves out."""


def has_side_effects(op: OpOverload) -> bool:
    """Test whether programs hold an operator in its effectful form.

    Not if it writes to operands, which are its results then, nor if it takes objects or belongs to the profiler: these
    are no part of a program.
    """
    if _is_never(op):
        return False
    return not op._schema.returns or _is_marked(op)


@functools.cache
def _is_never(op: OpOverload) -> bool:
    """Test for an operator that has no effectful form."""
    schema = op._schema
    parts = (*schema.arguments, *schema.returns)
    objects = any(isinstance(part.type, (torch.ClassType, torch.AnyType)) for part in parts)
    if objects or op.namespace == "profiler" or schema.is_mutable or op in _ORIGINALS or op in _NOT_AT_RUN_TIME:
        return True
    return op.namespace in ("aten", "prims", "spmd") and bool(schema.returns) and not _is_marked(op)


def _is_marked(op: OpOverload) -> bool:
    """Test whether torch lists an operator among those with side effects."""
    from torch._higher_order_ops.effects import has_effects  # no work at import

    listed = node._side_effectful_functions
    return op in listed or op.overloadpacket in listed or has_effects(op)


def effectful_form(op: OpOverload) -> OpOverload:
    """The operator that stands in programs for one with side effects."""
    with _DEFINING:
        if op not in _FORMS:
            library = torch.library.Library("spmd_effectful", "FRAGMENT")
            try:
                _FORMS[op] = _defined(op, library), library
            except BaseException:  # an interrupt, or a warning that is an error: torch defines an operator only once
                library._destroy()
                raise
    return _FORMS[op][0]


def _defined(op: OpOverload, library: torch.library.Library) -> OpOverload:
    schema, name = str(op._schema), op.name().replace("::", "_").replace(".", "_")
    signature = schema[schema.index("(") :]
    returns = bool(op._schema.returns)
    library.define(name + (signature if returns else f"{signature.removesuffix('()')}Tensor"))

    def call(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        return result if returns else torch.empty(0)

    def fake(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs) if returns else torch.empty(0)

    library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"spmd_effectful::{name}", fake, lib=library)
    form: OpOverload = getattr(torch.ops.spmd_effectful, name).default
    _ORIGINALS[form] = op
    declare_effect(form, Effect.ORDERED if returns else Effect.HOST)
    return form


def original(form: Any) -> OpOverload | None:
    """The operator for which an effectful form stands; None of another operator."""
    return _ORIGINALS.get(form)
