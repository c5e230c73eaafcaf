"""From a call of an operator on DTensors straight to its program, by a key that is cheap to make."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from spmd.api.eager.families import View
from spmd.api.eager.operator_program import Operator, OperatorCall
from spmd.api.eager.operators import takes_any_number
from spmd.api.eager.whole_operator import WholeOperator
from spmd.api.values.dtensor import DTensor
from spmd.core.compile_lock import COMPILING
from spmd.core.value_types import TORCH_VALUES
from spmd.errors import TraceError
from spmd.runtime.torch_settings import are_modes_off
from spmd.tracing.recorder import needs_values

MAX_PROGRAMS = 4096
"""The most programs that are kept, the least recently used goes first; and the most keys, beyond which all go."""

AnyOperator: TypeAlias = Operator | WholeOperator
Key: TypeAlias = tuple[Any, ...]
_Found: TypeAlias = tuple[AnyOperator | None, list[DTensor]]


@functools.lru_cache(maxsize=MAX_PROGRAMS)
def program_of(call: OperatorCall) -> AnyOperator:
    """The program of a call; of one whose results depend on values, the operator itself."""
    try:
        return Operator(call)
    except TraceError as error:
        if not needs_values(error):
            raise
    return WholeOperator(call)


_default_dtype = torch.get_default_dtype
_deterministic = torch._C._get_deterministic_algorithms


class _Calls:
    """The programs of one operator, by key.

    Args:
        op: the operator.
    """

    __slots__ = ("any_number", "operators")

    def __init__(self, op: torch._ops.OpOverload) -> None:
        self.any_number = takes_any_number(op)
        self.operators: dict[Key, AnyOperator | None] = {}  # None: there is one for each value of its numbers


_calls: dict[torch._ops.OpOverload, _Calls] = {}


def find(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> _Found:
    """The program for a call, and the DTensors of the call; None if no such call was remembered."""
    held: list[DTensor] = []
    calls = _calls.get(op)
    if calls is None or not are_modes_off():
        return None, held
    key = _key(args, kwargs, held, calls.any_number)
    operator = calls.operators.get(key)
    if operator is None:
        if key not in calls.operators:
            return None, held
        held = []
        operator = calls.operators.get(_key(args, kwargs, held, any_number=False))
        if operator is None:
            return None, held
    if View in [type(held[number]._family) for number in operator.call.written]:
        return None, held  # what it writes to depends on the base, too
    return operator, held


def remember(operator: AnyOperator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Keep the program of a call for the calls with its key."""
    call = operator.call
    if call.views or call.op is torch.ops.aten.as_strided.default or not are_modes_off():
        return  # what they read depends on the base of a view
    with COMPILING:
        if sum(len(calls.operators) for calls in _calls.values()) >= MAX_PROGRAMS:
            _calls.clear()
        calls = _calls.setdefault(call.op, _Calls(call.op))
    key = _key(args, kwargs, [], calls.any_number)
    if key and calls.any_number and (operator.kernel is None or any(spec.partial for spec in call.specs)):
        calls.operators[key] = None
        key = _key(args, kwargs, [], any_number=False)
    if key:
        calls.operators[key] = operator


def _key(args: Sequence[Any], kwargs: Mapping[str, Any] | None, held: list[DTensor], any_number: bool) -> Key:
    """The key of a call, and in `held` its DTensors; empty if it has other tensors or tensors in keyword arguments.

    1, 1.0 and True differ, and 0.0 and -0.0.
    """
    key = [_default_dtype(), _deterministic()]
    if not _read(args, key, held, any_number):
        return ()
    if kwargs:
        count = len(held)
        key += kwargs
        if not _read(tuple(kwargs.values()), key, held, any_number) or len(held) > count:
            return ()
    return tuple(key)


def _read(leaves: Sequence[Any], key: list[Any], held: list[DTensor], any_number: bool) -> bool:
    for leaf in leaves:
        kind = type(leaf)
        if kind is DTensor:
            key.append(leaf._spec)
            if leaf._strides is not None:
                key.append(leaf._strides)
            held.append(leaf)
        elif kind is int or kind is float:
            key.append(kind)
            if not any_number:
                key.append(repr(leaf) if kind is float else leaf)
        elif kind is list and leaf and type(leaf[0]) is int and not any_number:
            key += (kind, tuple(leaf))  # dims or a shape
        elif kind is list or kind is tuple:
            key += (kind, len(leaf))
            if not _read(leaf, key, held, any_number):
                return False
        elif kind in _CONSTANTS:
            key += (kind, leaf)
        else:
            return False
    return True


_CONSTANTS = frozenset({type(None), bool, str, *TORCH_VALUES})
