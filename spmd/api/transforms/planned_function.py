"""Flat functions that are planned: each transform is a program of its own, planned and cached.

Under reverse mode the forward program also returns *residuals*, laid out as in one plan of both passes; the backward
program reads them, so nothing is computed twice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from spmd.api.programs.options import Options
from spmd.api.programs.program import Program, StandIn
from spmd.api.transforms.flat_function import Flat, FlatFunction, positions, replaced
from spmd.api.values.distribute import place
from spmd.api.values.dtensor import DTensor
from spmd.api.values.wrapper import delete_shards
from spmd.core.compile_lock import compiled_property
from spmd.core.mesh import Mesh, use_mesh
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.core.value_types import is_continuous
from spmd.errors import TraceError
from spmd.ir.graph import Graph, Value
from spmd.runtime.ownership import is_owned
from spmd.tracing.manual.packing import Packing, packings, with_packed_inputs, with_packed_outputs
from spmd.tracing.manual.partition import Joint
from spmd.tracing.trace import trace_flat
from spmd.tracing.traced import Traced

_REFUSALS = (
    "backward() called inside a functorch transform",
    "attempting to call Tensor.requires_grad_()",
)
"""Messages of torch.func for functions that only autograd differentiates."""


class PlannedFunction(FlatFunction[DTensorSpec, P | None]):
    """A flat function that runs as a program.

    Args:
        function: the function.
        mesh: the mesh.
        in_specs: the spec of every argument.
        out_specs: the given spec of every result; None for one that the planner chooses.
        options: those of `jit`.
        name: the name of its program.
        plain: the numbers of the results that are plain tensors, whose spec is P(): gradients of plain arguments.
    """

    def __init__(
        self,
        function: Flat,
        mesh: Mesh,
        in_specs: Sequence[DTensorSpec],
        out_specs: Sequence[P | None],
        options: Options,
        name: str,
        plain: Sequence[int] = (),
    ) -> None:
        super().__init__(function, mesh, in_specs, plain)
        self.name, self.options, self.given = name, options, tuple(out_specs)
        self.saving = functools.cache(self._saving)  # type: ignore[method-assign]
        self._by_autograd = False

    @functools.cached_property
    def is_random(self) -> bool:  # type: ignore[override]
        return any(operation.is_random for operation in self.program.traced.graph.operations)

    @compiled_property
    def program(self) -> Program:
        """Its program."""
        return self.compiled(self.function, self.in_specs, self.given)

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The numbers of the results that have derivatives."""
        return tuple(n for n, spec in enumerate(self.program.out_specs) if is_continuous(spec.meta.dtype))

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return run(self.program, leaves, self.plain)

    def compiled(self, function: Flat, in_specs: Sequence[DTensorSpec], given: Sequence[P | None]) -> Program:
        """The program of another function, with the options of this one."""
        return self.of_graph(self.trace(function, in_specs), in_specs, given)

    def trace(self, function: Flat, in_specs: Sequence[DTensorSpec]) -> Graph:
        """Trace a function."""
        stand_ins = [StandIn(spec.meta, self.mesh.device) for spec in in_specs]
        with use_mesh(self.mesh):
            return trace_flat(function, stand_ins, rng=self.options.rng)

    def of_graph(self, graph: Graph, in_specs: Sequence[DTensorSpec], given: Sequence[P | None]) -> Program:
        """A program of a graph, with the options of this one."""
        metas = [value.meta for value in graph.outputs]
        out_specs = tuple(
            None if spec is None else DTensorSpec.make(self.mesh, spec, meta)
            for spec, meta in zip(given, metas, strict=True)
        )
        return Program(Traced.flat(graph, self.name), self.mesh, tuple(in_specs), out_specs, frozenset(), self.options)

    def derived(
        self,
        function: Flat,
        in_specs: Sequence[DTensorSpec],
        out_specs: Sequence[P | None],
        name: str,
        plain: Sequence[int],
    ) -> PlannedFunction:
        return PlannedFunction(function, self.mesh, in_specs, out_specs, self.options, f"{name}_of_{self.name}", plain)

    def joint(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Joint:
        """The program of all results, and of the gradients of the arguments `wanted` for cotangents of `given`."""

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            results, gradients = self.vjp(wanted, given, tensors)
            return [*results, *gradients]

        specs = (*self.in_specs, *self.cotangent_specs(given))
        try:
            graph = self.trace(function, specs)
        except RuntimeError as error:
            if self._by_autograd or not any(text in str(error) for text in _REFUSALS):
                raise
            self._by_autograd = True
            graph = self.trace(function, specs)
        return Joint(graph, len(self.in_specs), len(self.program.out_specs))

    def cotangent_specs(self, results: Sequence[int]) -> list[DTensorSpec]:
        return [self.program.out_specs[number].complete for number in results]

    def input_tangent_specs(self, arguments: Sequence[int]) -> list[DTensorSpec]:
        return [self.in_specs[number].complete for number in arguments]

    def tangent_specs(self, results: Sequence[int]) -> list[P | None]:
        return [self.given[number] for number in results]

    def gradient_specs(self, arguments: Sequence[int], plain: Sequence[int]) -> list[P | None]:
        return [P() if number in plain else self.in_specs[number].complete.pspec for number in arguments]

    def vjp(
        self, wanted: Sequence[int], given: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        if not self._by_autograd:
            return super().vjp(wanted, given, tensors)
        return self._vjp_by_autograd(wanted, given, tensors[: len(self.in_specs)], tensors[len(self.in_specs) :])

    def _vjp_by_autograd(
        self,
        wanted: Sequence[int],
        given: Sequence[int],
        primals: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor],
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Compute `vjp` by autograd, for functions that torch.func refuses (`_REFUSALS`).

        Raises:
            TraceError: a transform acts on the derivative, or the function writes gradients into arguments.
        """
        if any(tensor.requires_grad or is_functorch_wrapped_tensor(tensor) for tensor in (*primals, *cotangents)):
            raise TraceError(
                f"{self.name} has no second derivative: it calls .backward() or requires_grad_(). Use "
                "torch.autograd.grad or torch.func."
            )
        leaves = [primals[number].detach().requires_grad_() for number in wanted]
        results = self.function(*replaced(primals, wanted, leaves))
        if any(leaf.grad is not None for leaf in leaves):
            raise TraceError(
                f".backward() in {self.name} writes gradients into arguments, which require grad outside: they "
                "would be lost. Use torch.autograd.grad, or call it under torch.no_grad() and return x.grad."
            )
        pulled = [(results[n], x) for n, x in zip(given, cotangents, strict=True) if results[n].requires_grad]
        outputs, gradients = zip(*pulled, strict=True) if pulled else ((), ())
        found = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, materialize_grads=True)
        return [result.detach() for result in results], found

    def _saving(self, wanted: tuple[int, ...], plain: tuple[int, ...]) -> SavesResiduals:
        """The function where the arguments `wanted` may get gradients; those of the arguments `plain` are plain."""
        return SavesResiduals(self, tuple(n for n in wanted if is_continuous(self.in_specs[n].meta.dtype)), plain)

    def _batched(
        self, in_dims: tuple[int | None, ...], size: int, randomness: str, axes: tuple[tuple[str, ...], ...]
    ) -> PlannedFunction:
        free = [_free_axes(sharding, spec.pspec) for sharding, spec in zip(axes, self.in_specs, strict=True)]
        specs = [
            spec if dim is None else _with_dim(spec, dim, size, sharding)
            for spec, dim, sharding in zip(self.in_specs, in_dims, free, strict=True)
        ]
        batch = max(free, key=len)
        given = [None if spec is None else _batch_spec(spec, batch) for spec in self.given]
        return self.derived(self.over_batch(in_dims, randomness), specs, given, "batched", self.plain)


class SavesResiduals:
    """A flat function under reverse mode: its forward program also returns residuals, which backward programs read.

    Args:
        function: the function.
        wanted: the numbers of the arguments that may get gradients.
        plain: those of the arguments that are plain tensors.
    """

    def __init__(self, function: PlannedFunction, wanted: tuple[int, ...], plain: tuple[int, ...]) -> None:
        self.function, self.wanted, self.plain = function, wanted, plain
        self.joint = function.joint(self.wanted, function.differentiable)
        self.packings = packings(self.joint.graph, self.joint.reads, function.mesh)
        specs = self._joint_specs()
        held = dict(zip(self.joint.graph.inputs, function.in_specs, strict=False))
        self.residuals = tuple(value for value, spec in specs.items() if value not in held or spec != held[value])
        given = (*function.given, *(specs[value].pspec for value in self.residuals))
        graph = with_packed_outputs(self.joint.forward(self.residuals), self.packings)
        self.program = function.of_graph(graph, function.in_specs, given)
        self.backward = functools.cache(self._backward)

    def _joint_specs(self) -> dict[Value, DTensorSpec]:
        """The specs of what the backward pass reads, but for results, where both passes are planned as one.

        An argument that is gathered for both passes has another spec than its own: it is gathered once, too.
        """
        function, graph = self.function, self.joint.graph
        results = graph.outputs[: self.joint.results]
        reads = tuple(value for value in self.joint.reads if value not in results)
        in_specs = (*function.in_specs, *function.cotangent_specs(function.differentiable))
        given = (*function.given, *function.gradient_specs(self.wanted, self.plain), *[None] * len(reads))
        packed = with_packed_outputs(attrs.evolve(graph, outputs=(*graph.outputs, *reads)), self.packings)
        plan = function.of_graph(packed, in_specs, given).plan
        planned = plan.graph.outputs[len(graph.outputs) :]
        return {value: plan.specs[other] for value, other in zip(reads, planned, strict=True)}

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the forward program."""
        return run(self.program, leaves, self.function.plain)

    @functools.cached_property
    def available(self) -> tuple[Value, ...]:
        """The values that are kept for the backward program: arguments, results and residuals."""
        graph = self.joint.graph
        return (*graph.inputs[: self.joint.primals], *graph.outputs[: self.joint.results], *self.residuals)

    def _joint(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Joint:
        """As `PlannedFunction.joint`; a part of the program of all gradients if its cotangents are these.

        It has not the gradient of an argument on which only an inner one of several transforms acts.
        """
        if given != self.function.differentiable or not set(wanted) <= set(self.wanted):
            return self.function.joint(wanted, given)
        return self.joint.with_gradients([self.wanted.index(number) for number in wanted])

    def _backward(self, wanted: tuple[int, ...], given: tuple[int, ...], plain: tuple[int, ...]) -> Backward:
        """The backward program for the cotangents of the results `given`."""
        function, joint = self.function, self._joint(wanted, given)
        same = joint.corresponding(self.joint)
        mine = {its: value for value, its in same.items()}
        known = {mine[value]: number for number, value in enumerate(self.available) if value in mine}
        graph, reads = joint.backward(known)
        graph = with_packed_inputs(graph, {value: p for value in reads if (p := self._packing(value, same))})
        numbers = tuple(known[value] for value in reads)
        specs = (*function.in_specs, *self.program.out_specs)
        in_specs = [*(specs[number] for number in numbers), *function.cotangent_specs(given)]
        is_random = any(operation.is_random for operation in graph.operations)
        program = function.of_graph(graph, in_specs, function.gradient_specs(wanted, plain))
        return Backward(program, numbers, is_random, positions(wanted, plain), _constant(graph, len(reads)))

    def _packing(self, value: Value, same: Mapping[Value, Value]) -> Packing | None:
        """The packing of a value that a backward program reads, if it is per-rank; `same` maps it to this program's."""
        known = self.packings.get(same[value])
        return known and known.renamed(value)


@attrs.frozen(eq=False)
class Backward:
    """A backward program.

    Args:
        program: the program.
        reads: the numbers of the values that it reads among arguments, results and residuals.
        is_random: whether it draws random numbers, which would be others than those of the forward pass.
        plain: the numbers of the gradients that are plain tensors.
        unused: those that depend on no cotangent: they are zero, and for autograd there are none.
    """

    program: Program
    reads: tuple[int, ...]
    is_random: bool
    plain: tuple[int, ...]
    unused: tuple[int, ...]


def _constant(graph: Graph, count: int) -> tuple[int, ...]:
    """The numbers of the outputs that depend on none but the first inputs, of a count."""
    late = set(graph.inputs[count:])
    for operation in graph.operations:
        if not late.isdisjoint(operation.operands):
            late.update(operation.tensors)
    return tuple(number for number, value in enumerate(graph.outputs) if value not in late)


def run(program: Program, leaves: Sequence[torch.Tensor], plain: Sequence[int]) -> list[torch.Tensor]:
    """Run a program on plain tensors and DTensors; those with other specs are moved.

    Args:
        program: the program.
        leaves: its arguments.
        plain: the numbers of the results that are returned as plain tensors.
    """
    with temporarily_clear_interpreter_stack():
        shards = [
            leaf._shards if isinstance(leaf, DTensor) and leaf._spec == spec else place(leaf, spec)._shards
            for leaf, spec in zip(leaves, program.in_specs, strict=True)
        ]
        results: list[Any] = program(shards)
        for number in plain:
            results[number] = _taken(results[number])
        return results


def _taken(value: DTensor) -> torch.Tensor:
    """The plain tensor of a replicated result that nothing else reads; a copy if anything shares its memory."""
    shard = value._shards[0]
    delete_shards(value)
    return shard if is_owned([shard])[0] else shard.clone(memory_format=torch.contiguous_format)


def _with_dim(spec: DTensorSpec, dim: int, size: int, axes: tuple[str, ...]) -> DTensorSpec:
    """The spec of a tensor with one more dim, sharded over axes."""
    shape, dims = list(spec.meta.shape), list(spec.dims)
    shape.insert(dim, size)
    dims.insert(dim, axes)
    return DTensorSpec.make(spec.mesh, P(*dims, partial=dict(spec.partial)), TensorMeta(tuple(shape), spec.meta.dtype))


def _batch_spec(spec: P, axes: tuple[str, ...]) -> P:
    """The spec of a batch of results: sharded over `axes` in dim 0, as far as the results are not."""
    return P(_free_axes(axes, spec), *spec.dims, partial=dict(spec.partial))


def _free_axes(axes: Sequence[str], spec: P) -> tuple[str, ...]:
    """Those of some mesh axes that a spec does not use."""
    used = {axis for dim in spec.dims for axis in dim} | set(dict(spec.partial))
    return tuple(axis for axis in axes if axis not in used)
