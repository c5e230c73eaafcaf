"""What is asked of the planner: a program, where its ends lie, and what a plan may not do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs
import torch

from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph
from spmd.plan.machine.machine import Machine
from spmd.rules import RULES
from spmd.rules.rule import Rule


def _specs(specs: Sequence[DTensorSpec]) -> tuple[DTensorSpec, ...]:
    return tuple(specs)


_NOTHING_KEPT: Mapping[int, frozenset[str]] = MappingProxyType({})


@attrs.frozen(eq=False, repr=False)
class Request:
    """The input of `plan`; every plan keeps the one that it answers.

    Args:
        graph: the program over global tensors, in canonical form.
        mesh: the mesh.
        input_specs, output_specs: the spec of every input and output.
        rules: the sharding rules.
        machine: the machine's cost constants.
        memory_limit: the most bytes that a rank may hold at once; None for no limit.
        donated: positions of inputs whose memory the program may take over.
        keep_sharded: mesh axes along which an input is never to be gathered, by the input's position.
        input_paths: where each input stands among the user's arguments, for questions: `0['w']`; empty if nobody knows.
    """

    graph: Graph
    mesh: Mesh
    input_specs: tuple[DTensorSpec, ...] = attrs.field(converter=_specs)
    output_specs: tuple[DTensorSpec, ...] = attrs.field(converter=_specs)
    rules: Mapping[torch._ops.OpOverload, Rule] = RULES
    machine: Machine = attrs.field(factory=Machine)
    memory_limit: int | None = None
    donated: frozenset[int] = frozenset()
    keep_sharded: Mapping[int, frozenset[str]] = _NOTHING_KEPT
    input_paths: tuple[str, ...] = ()
