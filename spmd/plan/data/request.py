"""The planner's input: a program, the specs of its inputs and outputs, and constraints on the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph
from spmd.plan.machine.machine import Machine
from spmd.rules import RULES
from spmd.rules.rule import Rule


def _as_tuple(items: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(items)


_NONE_NEVER_GATHERED: Mapping[int, frozenset[str]] = MappingProxyType({})


@attrs.frozen(eq=False, repr=False)
class Request:
    """The input of `plan`; every plan has the request that it was made for.

    Args:
        graph: the program over global tensors, in canonical form.
        mesh: the mesh.
        input_specs: the spec of every input, over physical dims.
        output_specs: the spec of every output; None for an output whose spec the planner chooses.
        rules: the sharding rule of every operator that has one.
        machine: the machine's cost constants.
        memory_limit: the most bytes that a rank may hold at once; None for no limit.
        donated: positions of inputs that are donated, as by `jax.jit`: their memory may be freed after their last use.
        keep_sharded: by the position of an input, the mesh axes along which it is never gathered.
        reduce_dtype: the dtype in which floating values of fewer bits are summed over ranks; None for their own.
        input_paths: the path of each input in the user's arguments, such as `0['w']`; empty if unknown.
        gather_seconds: seconds that count for gathering what `keep_sharded` names; finite to find out what has to be.
        made_elsewhere: for a plan that was made for another machine than the one where it runs, both of them in words.
    """

    graph: Graph
    mesh: Mesh
    input_specs: tuple[DTensorSpec, ...] = attrs.field(converter=_as_tuple)
    output_specs: tuple[DTensorSpec | None, ...] = attrs.field(converter=_as_tuple)
    rules: Mapping[torch._ops.OpOverload, Rule] = RULES
    machine: Machine = attrs.field(factory=Machine)
    memory_limit: int | None = None
    donated: frozenset[int] = frozenset()
    keep_sharded: Mapping[int, frozenset[str]] = _NONE_NEVER_GATHERED
    reduce_dtype: torch.dtype | None = None
    input_paths: tuple[str, ...] = ()
    gather_seconds: float = math.inf
    made_elsewhere: str = ""
