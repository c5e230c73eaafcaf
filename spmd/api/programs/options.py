"""The options of `jit`: their types and their validation.

The classes of plans, machines and rules are imported for an option that is given, not by `import spmd`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import attrs
import torch
from attrs.validators import optional

from spmd.api.programs.never_gathered import KeepSharded, parse_keep_sharded
from spmd.core.compile_lock import COMPILING
from spmd.core.mesh import Mesh
from spmd.core.quantity import parse_bytes
from spmd.errors import PlanError, RuleError, TraceError
from spmd.tracing.draw_scopes import Rng

if TYPE_CHECKING:
    from spmd.inspect.plan import Plan
    from spmd.inspect.questions.budget import Budget
    from spmd.plan.machine.machine import Machine
    from spmd.rules.rule import Rule

Comms = Literal["allow", "error"] | Mapping[str, int | str]
"""Limits of communication: `"allow"` has none, `"error"` forbids it, a mapping limits count or bytes by kind."""


class JitOptions(TypedDict, total=False):
    """The keyword arguments of `jit`, which documents them."""

    in_specs: object
    out_specs: object
    in_shardings: object
    out_shardings: object
    mesh: Mesh | None
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    donate_argnums: int | Sequence[int]
    comms: Comms
    backend: Literal["eager", "inductor"]
    machine: Machine | None
    rules: Mapping[Any, Rule] | None
    memory_limit: int | str | None
    plan: Plan | str | os.PathLike[str] | None
    keep_sharded: KeepSharded | None
    reduce_dtype: torch.dtype | None
    rng: Rng
    reuse_layers: bool


def _argnums(numbers: int | Sequence[int]) -> tuple[int, ...]:
    found = _items(numbers, int)
    if not all(type(number) is int for number in found):
        raise TraceError(f"Argument numbers are positions from 0, or from the end below it (got {numbers!r}).")
    return found


def _argnames(names: str | Sequence[str]) -> tuple[str, ...]:
    found = _items(names, str)
    if not all(isinstance(name, str) for name in found):
        raise TraceError(f"static_argnames must be names of parameters (got {names!r}).")
    return found


def _items(given: Any, single: type) -> tuple[Any, ...]:
    """The items of an option that takes one or several; what is neither counts as one."""
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, single) else (given,)


def _one_of(*allowed: str) -> Callable[[Any, attrs.Attribute[str], str], None]:
    def check(_: Any, attribute: attrs.Attribute[str], value: str) -> None:
        if value not in allowed:
            raise PlanError(f"{attribute.name} must be one of {', '.join(map(repr, allowed))} (got {value!r}).")

    return check


def _check_backend(_: Any, attribute: attrs.Attribute[str], value: str) -> None:
    _one_of("eager", "inductor")(_, attribute, value)
    if value == "inductor":
        raise PlanError("backend='inductor' is not available yet. Use backend='eager'.")


def _check_reduce_dtype(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise PlanError(f"reduce_dtype must be a floating dtype, as torch.float32 (got {value!r:.80}).")


def _check_flag(_: Any, attribute: attrs.Attribute[bool], value: Any) -> None:
    if not isinstance(value, bool):
        raise PlanError(f"{attribute.name} must be True or False (got {value!r:.80}).")


def _check_machine(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    with COMPILING:
        from spmd.plan.machine.machine import Machine

    if not isinstance(value, Machine):
        raise PlanError(f"machine must be a spmd.Machine (got {value!r}).")


def _check_plan(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, (str, os.PathLike)):
        return
    with COMPILING:
        from spmd.inspect.plan import Plan

    if not isinstance(value, Plan):
        raise PlanError(f"plan must be a path or a spmd.inspect.Plan (got {value!r:.80}).")


def _check_rules(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    with COMPILING:
        from spmd.rules.rule import Rule

    if not isinstance(value, Mapping):
        adds = "your_operator.rules" if hasattr(value, "rules") else "{op: rule}"
        raise RuleError(
            f"rules must map operators to spmd.rules.Rule (got {value!r:.80}). Write spmd.rules.RULES | {adds}."
        )
    for op, rule in value.items():
        if not isinstance(op, torch._ops.OpOverload):
            found = getattr(op, "_opoverload", getattr(op, "default", None))
            written = f"torch.ops.{found}" if isinstance(found, torch._ops.OpOverload) else "torch.ops.aten.mm.default"
            raise RuleError(
                f"A key of rules must be one overload of an operator (got {type(op).__name__} {op!r:.60}). Write "
                f"spmd.rules.RULES | {{{written}: rule}}."
            )
        if not isinstance(rule, Rule):
            raise RuleError(
                f"rules[{op}] must be a spmd.rules.Rule (got {type(rule).__name__} {rule!r:.60}). Make one of the "
                "operator's factors, as spmd.rules.factors('i k, k j -> i j', sum='k'), or by pointwise(), reduction() "
                "or along() of spmd.rules."
            )


def _budget(comms: Comms) -> Budget | None:
    if comms == "allow":
        return None
    with COMPILING:
        from spmd.inspect.questions.budget import parse_budget

    return parse_budget(comms)


def _memory_limit(limit: int | str | None) -> int | None:
    return None if limit is None else parse_bytes(limit, "memory_limit")


@attrs.frozen
class Options:
    """The validated options of a jitted function; `jit` documents them."""

    static_argnums: tuple[int, ...] = attrs.field(converter=_argnums)
    donate_argnums: tuple[int, ...] = attrs.field(converter=_argnums)
    comms: Budget | None = attrs.field(converter=_budget)
    backend: str = attrs.field(validator=_check_backend)
    machine: Machine | None = attrs.field(validator=optional(_check_machine))
    rules: Mapping[Any, Rule] | None = attrs.field(validator=optional(_check_rules))
    memory_limit: int | None = attrs.field(default=None, converter=_memory_limit)
    plan: Plan | str | os.PathLike[str] | None = attrs.field(default=None, validator=optional(_check_plan))
    keep_sharded: tuple[tuple[str, tuple[str, ...]], ...] = attrs.field(default=None, converter=parse_keep_sharded)
    reduce_dtype: torch.dtype | None = attrs.field(default=None, validator=optional(_check_reduce_dtype))
    static_argnames: tuple[str, ...] = attrs.field(default=(), converter=_argnames)
    rng: Rng = attrs.field(default="torch", validator=_one_of("torch", "counter"))
    reuse_layers: bool = attrs.field(default=True, validator=_check_flag)
