"""Hypothesis strategies for whole programs: a random function, a mesh, arguments on it, and specs of the results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from hypothesis import assume
from hypothesis import strategies as st

from spmd.api.jit import Jitted, jit
from spmd.api.values.dtensor import DTensor
from spmd.core.mesh import Mesh
from spmd.core.placement import REDUCTIONS, supports_reduction
from spmd.core.spec import P, TensorMeta
from spmd.plan.machine.machine import Machine
from spmd.testing.operators import OPERATORS, SHARDING, real, sharding_operators
from spmd.testing.strategies import meshes, pspecs, shapes, shards, tensor_specs

MACHINES = (Machine(), Machine(flops=1e9, memory_bandwidth=1e8, latency=0.0))
"""The default machine, on which small tensors are best replicated, and one on which it is faster to shard them."""

_LARGEST = 4096  # elements of a value that steps produce; larger ones are truncated


@attrs.frozen
class RandomStep:
    """One step of a program: an operator by name, two operands (0 is the newest value), and its number argument."""

    operator: str
    first: int
    second: int
    number: int


@attrs.frozen
class RandomProgram:
    """A pure function of tensors: steps that run in order on a growing list of values.

    It returns the last two values and, with `gradient`, the gradients of a weighted sum of them by all floating-point
    arguments.
    """

    steps: tuple[RandomStep, ...]
    gradient: bool = True

    def __call__(self, *args: torch.Tensor, mesh: Mesh | None = None) -> Any:
        """The results, as a list of tensors; without `mesh`, steps do not constrain shardings."""
        if not self.gradient:
            return self.values(args, mesh)
        chosen = [index for index, arg in enumerate(args) if arg.is_floating_point()]

        def loss(*floats: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            given = dict(zip(chosen, floats, strict=True))
            values = self.values([given.get(index, arg) for index, arg in enumerate(args)], mesh)
            total = sum((real(v) * (0.7 + n)).sum() for n, v in enumerate(values))
            return total + 0.0 * floats[0].sum(), values  # type: ignore[return-value]

        grads, values = torch.func.grad(loss, argnums=tuple(range(len(chosen))), has_aux=True)(
            *[args[index] for index in chosen]
        )
        return [*values, *grads]

    def values(self, args: Sequence[torch.Tensor], mesh: Mesh | None) -> list[torch.Tensor]:
        """Run the steps; returns the last two values."""
        operators = {**OPERATORS, **sharding_operators(mesh)}
        known = list(args)
        for step in self.steps:
            first, second = (known[-1 - position % len(known)] for position in (step.first, step.second))
            made = operators[step.operator](first, second, step.number)
            known += [made] if isinstance(made, torch.Tensor) else list(made)
            if known[-1].numel() > _LARGEST:
                known[-1] = known[-1].flatten()[:_LARGEST]
        return known[-2:]


@attrs.frozen(eq=False)
class Case:
    """A program, and what is needed to run it on a mesh and on one device.

    Args:
        program: the function.
        mesh: the mesh.
        arguments: the arguments as DTensors on the mesh.
        whole: the same arguments as plain tensors.
        out_specs: a spec for every result; None for one that the planner chooses.
        machine: the machine for the planner.
    """

    program: RandomProgram
    mesh: Mesh
    arguments: tuple[DTensor, ...]
    whole: tuple[torch.Tensor, ...] = attrs.field(repr=False)
    out_specs: tuple[P | None, ...]
    machine: Machine

    def jitted(self) -> Jitted:
        """The program under `jit` on the mesh."""
        specs = tuple(argument.spec.pspec for argument in self.arguments)
        function = functools.partial(self.program, mesh=self.mesh)
        return jit(function, specs, list(self.out_specs), mesh=self.mesh, machine=self.machine)


steps = st.builds(
    RandomStep,
    st.sampled_from((*OPERATORS, *SHARDING)),
    st.sampled_from((0, 0, 0, 1, 2, 3)),
    st.integers(0, 5),
    st.integers(0, 31),
)
"""A strategy for steps of programs."""


@st.composite
def cases(draw: st.DrawFn, max_steps: int = 6, max_size: int = 6) -> Case:
    """Programs with arguments on drawn meshes, without those whose results rounding alone would change.

    Args:
        draw: given by Hypothesis.
        max_steps: the most steps of a program.
        max_size: the most elements of a dim of an argument.
    """
    mesh = draw(meshes(max_size=3))
    program = RandomProgram(tuple(draw(st.lists(steps, min_size=1, max_size=max_steps))), draw(st.booleans()))
    arguments, wholes = [], []
    for dtype in (torch.float64, torch.float64, draw(st.sampled_from((torch.float64, torch.int64, torch.bool)))):
        meta = TensorMeta(draw(shapes(max_size=max_size)), dtype)
        spec = draw(tensor_specs(mesh, meta))
        held, value = draw(shards(spec))
        arguments.append(DTensor.from_local(held, mesh, spec.pspec, shape=meta.shape))
        wholes.append(value)
    results = program(*wholes)
    assume(_is_stable(program, wholes, results))
    out_specs = []
    for result in results:
        reductions = tuple(op for op in REDUCTIONS if supports_reduction(op, result.dtype))
        given = pspecs(mesh.names, result.ndim, reductions)
        out_specs.append(draw(st.one_of(given, given, st.none())))
    return Case(program, mesh, tuple(arguments), tuple(wholes), tuple(out_specs), draw(st.sampled_from(MACHINES)))


def _is_stable(program: RandomProgram, args: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    """Whether a change of arguments in the size of rounding changes the results only in the size of rounding."""
    moved = [arg * (1 + 1e-13) + 1e-13 if arg.is_floating_point() else arg for arg in args]
    return all(agree(other, result) for other, result in zip(program(*moved), results, strict=True))


def agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have equal shapes and dtypes, and values that differ only by rounding in float64."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    scale = expected.nan_to_num(0, 0, 0).abs().amax().item() if expected.numel() else 0.0
    return torch.allclose(actual, expected, rtol=1e-8, atol=1e-9 * max(1.0, scale), equal_nan=True)
