"""Jitted functions under transforms from outside: autograd, and `torch.func` with grad, vjp, jvp and vmap.

Each transform of a flat function is a flat function again, and each runs as a program of its own, planned and cached.
Under reverse mode the forward program also returns *residuals*, laid out as in one plan of both passes; the backward
program reads them, so nothing is computed twice. Second derivatives, and vmap over pullbacks, compute forward values
again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from spmd.api.distribute import place
from spmd.api.dtensor import DTensor
from spmd.api.options import Options
from spmd.api.program import Program, StandIn
from spmd.core.mesh import Mesh, use_mesh
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.ir.graph import Graph, Value
from spmd.ir.partition import Joint
from spmd.tracing.trace import Traced, trace_flat

_any_requires_grad = torch._C._any_requires_grad  # type: ignore[attr-defined]

Flat = Callable[..., Sequence[torch.Tensor]]
"""A function from tensors to tensors."""


def is_transformed(leaves: Sequence[Any]) -> bool:
    """Whether a transform from outside acts on a tensor, or autograd records what is computed from it."""
    if torch.is_grad_enabled() and _any_requires_grad(*leaves):
        return True
    if peek_interpreter_stack() is None:
        return False
    return any(isinstance(leaf, torch.Tensor) and is_functorch_wrapped_tensor(leaf) for leaf in leaves)


class FlatFunction:
    """A flat function, the specs of its arguments and results, and its transforms, each made once.

    Args:
        function: the function.
        mesh: the mesh.
        in_specs: the spec of every argument.
        out_specs: the given spec of every result; None for one that the planner chooses.
        options: those of `jit`.
        name: the name of its program.
    """

    def __init__(
        self,
        function: Flat,
        mesh: Mesh,
        in_specs: Sequence[DTensorSpec],
        out_specs: Sequence[P | None],
        options: Options,
        name: str,
    ) -> None:
        self.function, self.mesh, self.name, self.options = function, mesh, name, options
        self.in_specs, self.given = tuple(in_specs), tuple(out_specs)
        self.pullback, self.pushforward = functools.cache(self._pullback), functools.cache(self._pushforward)
        self.batched, self.saving = functools.cache(self._batched), functools.cache(lambda: Saving(self))

    def __call__(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Call the function on tensors on which transforms may act."""
        return self.call(leaves, Draws(_generator_state(self.mesh.device) if self.is_random else None, replayed=False))

    def call(self, leaves: Sequence[torch.Tensor], draws: Draws) -> Sequence[torch.Tensor]:
        """As a call, with given random numbers."""
        stack = get_interpreter_stack() or ()
        batched = any(level.key() == TransformType.Vmap for level in stack)
        differentiates = any(leaf.requires_grad for leaf in leaves)
        node = self.saving() if differentiates and not batched else self
        results = _Call.apply(node, draws, *leaves)  # type: ignore[no-untyped-call]
        return results[: len(self.program.out_specs)]  # type: ignore[no-any-return]

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return any(operation.is_random for operation in self.program.traced.graph.operations)

    @functools.cached_property
    def program(self) -> Program:
        """Its program."""
        return self.compiled(self.function, self.in_specs, self.given)

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The numbers of the results that have derivatives."""
        return tuple(n for n, spec in enumerate(self.program.out_specs) if _is_continuous(spec.meta))

    def run(self, leaves: Sequence[torch.Tensor]) -> list[DTensor]:
        """Run its program."""
        return run(self.program, leaves)

    def compiled(self, function: Flat, in_specs: Sequence[DTensorSpec], given: Sequence[P | None]) -> Program:
        """The program of another function, with the options of this one."""
        return self.of_graph(self.trace(function, in_specs), in_specs, given)

    def trace(self, function: Flat, in_specs: Sequence[DTensorSpec]) -> Graph:
        """Trace a function."""
        stand_ins = [StandIn(spec.meta, self.mesh.device) for spec in in_specs]
        with use_mesh(self.mesh):
            return trace_flat(function, stand_ins)

    def of_graph(self, graph: Graph, in_specs: Sequence[DTensorSpec], given: Sequence[P | None]) -> Program:
        """A program of a graph, with the options of this one."""
        metas = [value.meta for value in graph.outputs]
        out_specs = tuple(
            None if spec is None else DTensorSpec.make(self.mesh, spec, meta)
            for spec, meta in zip(given, metas, strict=True)
        )
        return Program(Traced.flat(graph, self.name), self.mesh, tuple(in_specs), out_specs, frozenset(), self.options)

    def derived(
        self, function: Flat, in_specs: Sequence[DTensorSpec], out_specs: Sequence[P | None], name: str
    ) -> FlatFunction:
        """A transform of this function."""
        return FlatFunction(function, self.mesh, in_specs, out_specs, self.options, f"{name}_of_{self.name}")

    def joint(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Joint:
        """The program of all results, and of the gradients of the arguments `wanted` for cotangents of `given`."""

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            results, gradients = self._vjp(wanted, given, tensors)
            return [*results, *gradients]

        specs = (*self.in_specs, *self.cotangent_specs(given))
        return Joint(self.trace(function, specs), len(self.in_specs), len(self.program.out_specs))

    def cotangent_specs(self, given: Sequence[int]) -> list[DTensorSpec]:
        """The specs of the cotangents of some results: theirs, with nothing pending."""
        return [_complete(self.program.out_specs[number]) for number in given]

    def gradient_specs(self, wanted: Sequence[int]) -> list[P | None]:
        """The specs of the gradients of some arguments: theirs, with nothing pending."""
        return [_complete(self.in_specs[number]).pspec for number in wanted]

    def _vjp(
        self, wanted: Sequence[int], given: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """All results, and the gradients, from the arguments followed by the cotangents."""
        primals, cotangents = tensors[: len(self.in_specs)], tensors[len(self.in_specs) :]

        def differentiated(*some: torch.Tensor) -> Any:
            full = list(primals)
            for number, tensor in zip(wanted, some, strict=True):
                full[number] = tensor
            results = self.function(*full)
            return tuple(results[number] for number in given), tuple(results)

        made: Any = torch.func.vjp(differentiated, *(primals[n] for n in wanted), has_aux=True)
        _, pull, results = made
        return results, pull(tuple(cotangents))

    def _pullback(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> FlatFunction:
        """From arguments and cotangents of the results `given` to the gradients of the arguments `wanted`."""
        return self.derived(
            lambda *tensors: self._vjp(wanted, given, tensors)[1],
            (*self.in_specs, *self.cotangent_specs(given)),
            self.gradient_specs(wanted),
            "pullback",
        )

    def _pushforward(self, given: tuple[int, ...]) -> FlatFunction:
        """From arguments and tangents of the arguments `given` to the tangents of the differentiable results."""
        wanted = self.differentiable

        def function(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            primals, tangents = tensors[: len(self.in_specs)], tensors[len(self.in_specs) :]

            def differentiated(*some: torch.Tensor) -> Sequence[torch.Tensor]:
                full = list(primals)
                for number, tensor in zip(given, some, strict=True):
                    full[number] = tensor
                results = self.function(*full)
                return tuple(results[number] for number in wanted)

            moved = tuple(primals[number] for number in given)
            return torch.func.jvp(differentiated, moved, tuple(tangents))[1]  # type: ignore[no-any-return]

        specs = (*self.in_specs, *(_complete(self.in_specs[number]) for number in given))
        return self.derived(function, specs, [self.given[number] for number in wanted], "pushforward")

    def _batched(
        self, in_dims: tuple[int | None, ...], size: int, randomness: str, axes: tuple[tuple[str, ...], ...]
    ) -> FlatFunction:
        """The function over a batch; every result has it in dim 0.

        Args:
            in_dims: the batch dim of each argument; None for one that is the same for the whole batch.
            size: its length.
            randomness: as for `torch.func.vmap`.
            axes: for each argument, the mesh axes that shard its batch dim.
        """
        specs = [
            spec if dim is None else _with_dim(spec, dim, size, sharding)
            for spec, dim, sharding in zip(self.in_specs, in_dims, axes, strict=True)
        ]
        batch = max(axes, key=len)
        given = [None if spec is None else _batch_spec(spec, batch) for spec in self.given]
        function = torch.func.vmap(lambda *leaves: tuple(self.function(*leaves)), in_dims, 0, randomness)
        return self.derived(function, specs, given, "batched")


class Saving:
    """A flat function under reverse mode: its forward program also returns residuals, which backward programs read.

    Args:
        function: the function.
    """

    def __init__(self, function: FlatFunction) -> None:
        self.function = function
        self.wanted = tuple(n for n, spec in enumerate(function.in_specs) if _is_continuous(spec.meta))
        self.joint = function.joint(self.wanted, function.differentiable)
        specs = self._joint_specs()
        held = dict(zip(self.joint.graph.inputs, function.in_specs, strict=False))
        self.residuals = tuple(value for value, spec in specs.items() if value not in held or spec != held[value])
        given = (*function.given, *(specs[value].pspec for value in self.residuals))
        self.program = function.of_graph(self.joint.forward(self.residuals), function.in_specs, given)
        self.backward = functools.cache(self._backward)

    def _joint_specs(self) -> dict[Value, DTensorSpec]:
        """The specs of what the backward pass reads, but for results, where both passes are planned as one.

        An argument that is gathered for both passes has another spec than its own: it is gathered once, too.
        """
        function, graph = self.function, self.joint.graph
        results = graph.outputs[: self.joint.results]
        reads = tuple(value for value in self.joint.reads if value not in results)
        in_specs = (*function.in_specs, *function.cotangent_specs(function.differentiable))
        given = (*function.given, *function.gradient_specs(self.wanted), *[None] * len(reads))
        plan = function.of_graph(attrs.evolve(graph, outputs=(*graph.outputs, *reads)), in_specs, given).plan
        planned = plan.graph.outputs[len(graph.outputs) :]
        return {value: plan.specs[other] for value, other in zip(reads, planned, strict=True)}

    def run(self, leaves: Sequence[torch.Tensor]) -> list[DTensor]:
        """Run the forward program."""
        return run(self.program, leaves)

    @functools.cached_property
    def available(self) -> tuple[Value, ...]:
        """The values that are kept for the backward program: arguments, results and residuals."""
        graph = self.joint.graph
        return (*graph.inputs[: self.joint.primals], *graph.outputs[: self.joint.results], *self.residuals)

    def _backward(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Backward:
        """The backward program for the cotangents of the results `given`."""
        function, joint = self.function, self.function.joint(wanted, given)
        same = joint.corresponding(self.joint)
        mine = {its: value for value, its in same.items()}
        known = {mine[value]: number for number, value in enumerate(self.available) if value in mine}
        graph, reads = joint.backward(known)
        numbers = tuple(known[value] for value in reads)
        specs = (*function.in_specs, *self.program.out_specs)
        in_specs = [*(specs[number] for number in numbers), *function.cotangent_specs(given)]
        return Backward(function.of_graph(graph, in_specs, function.gradient_specs(wanted)), numbers)


@attrs.frozen(eq=False)
class Draws:
    """The random numbers of a call: a transform that computes forward values again must draw the same.

    Args:
        state: that of the default generator before the call; None if it draws nothing.
        replayed: whether the call draws from this state, and leaves the generator as it is.
    """

    state: torch.Tensor | None
    replayed: bool

    @property
    def again(self) -> Draws:
        """The same numbers, drawn again."""
        return Draws(self.state, replayed=True)

    def run(self, node: FlatFunction | Saving, leaves: Sequence[torch.Tensor]) -> list[DTensor]:
        """Run a program with these numbers."""
        if self.state is None or not self.replayed:
            return node.run(leaves)
        device = node.program.mesh.device
        before = _generator_state(device)
        _set_generator_state(device, self.state)
        try:
            return node.run(leaves)
        finally:
            _set_generator_state(device, before)


def _generator_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()


def _set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    (torch.cuda.set_rng_state if device.type == "cuda" else torch.set_rng_state)(state)


@attrs.frozen(eq=False)
class Backward:
    """A backward program, and the numbers of the values that it reads among arguments, results and residuals."""

    program: Program
    reads: tuple[int, ...]


class _Call(torch.autograd.Function):
    """A call of a flat function, or of one that saves residuals."""

    @staticmethod
    def forward(node: FlatFunction | Saving, draws: Draws, *leaves: torch.Tensor) -> Any:
        return tuple(draws.run(node, leaves))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        node, draws, *leaves = inputs
        ctx.node, ctx.draws, ctx.count = node, draws.again, len(leaves)
        results = len(output) - len(node.residuals) if isinstance(node, Saving) else len(output)
        constant = [value for n, value in enumerate(output) if n >= results or not value.is_floating_point()]
        ctx.mark_non_differentiable(*(value for value in constant if not value.is_complex()))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves, *(output if isinstance(node, Saving) else ()))
        ctx.save_for_forward(*leaves)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        node = ctx.node
        function = node.function if isinstance(node, Saving) else node
        results = len(function.program.out_specs)
        given = tuple(n for n, value in enumerate(cotangents[:results]) if value is not None)
        wanted = tuple(n for n, needed in enumerate(ctx.needs_input_grad[2:]) if needed)
        values = [value for value in cotangents[:results] if value is not None]
        leaves, outputs = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        if not given or not wanted:
            return (None,) * (ctx.count + 2)
        if isinstance(node, Saving):
            found = _Pull.apply(node, ctx.draws, wanted, given, *leaves, *values, *outputs)  # type: ignore[no-untyped-call]
        else:
            found = function.pullback(wanted, given).call([*leaves, *values], ctx.draws)
        gradients: list[Any] = [None] * (ctx.count + 2)
        for number, gradient in zip(wanted, found, strict=True):
            gradients[number + 2] = gradient
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, *tangents: torch.Tensor | None) -> Any:
        node = ctx.node
        function = node.function if isinstance(node, Saving) else node
        given = tuple(n for n, tangent in enumerate(tangents) if tangent is not None)
        outputs: list[Any] = [None] * len(node.program.out_specs)
        directions = [tangent for tangent in tangents if tangent is not None]
        moved = function.pushforward(given).call([*ctx.saved_tensors[: ctx.count], *directions], ctx.draws)
        for number, tangent in zip(function.differentiable, moved, strict=True):
            outputs[number] = tangent
        return tuple(outputs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, node: FlatFunction, draws: Draws, *leaves: torch.Tensor) -> Any:
        results = _over_batch(node, draws, info, in_dims[2:], leaves)
        return results, (0,) * len(results)


class _Pull(torch.autograd.Function):
    """A call of a backward program: on arguments, cotangents, and then results and residuals."""

    @staticmethod
    def forward(
        node: Saving, draws: Draws, wanted: tuple[int, ...], given: tuple[int, ...], *tensors: torch.Tensor
    ) -> Any:
        backward = node.backward(wanted, given)
        count = node.joint.primals
        kept = (*tensors[:count], *tensors[count + len(given) :])
        cotangents = tensors[count : count + len(given)]
        return tuple(run(backward.program, [*(kept[number] for number in backward.reads), *cotangents]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        node, ctx.draws, wanted, given, *tensors = inputs
        ctx.node, ctx.wanted, ctx.given, ctx.total = node, wanted, given, len(tensors)
        ctx.count = node.joint.primals + len(given)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[: ctx.count])
        ctx.save_for_forward(*tensors[: ctx.count])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        pullback = ctx.node.function.pullback(ctx.wanted, ctx.given)
        given = tuple(n for n, value in enumerate(cotangents) if value is not None)
        wanted = tuple(n for n, needed in enumerate(ctx.needs_input_grad[4 : 4 + ctx.count]) if needed)
        gradients: list[Any] = [None] * (ctx.total + 4)
        if given and wanted:
            values = [value for value in cotangents if value is not None]
            found = pullback.pullback(wanted, given).call([*ctx.saved_tensors, *values], ctx.draws)
            for number, gradient in zip(wanted, found, strict=True):
                gradients[number + 4] = gradient
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        pullback = ctx.node.function.pullback(ctx.wanted, ctx.given)
        moved = tangents[4 : 4 + ctx.count]
        given = tuple(n for n, tangent in enumerate(moved) if tangent is not None)
        values = [*ctx.saved_tensors, *(moved[number] for number in given)]
        return tuple(pullback.pushforward(given).call(values, ctx.draws))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, node: Saving, draws: Draws, wanted: Any, given: Any, *tensors: torch.Tensor
    ) -> Any:
        count = node.joint.primals + len(given)
        pullback = node.function.pullback(wanted, given)
        results = _over_batch(pullback, draws, info, in_dims[4 : 4 + count], tensors[:count])
        return results, (0,) * len(results)


def _over_batch(function: FlatFunction, draws: Draws, info: Any, in_dims: Sequence[int | None], leaves: Any) -> Any:
    """Call a function on a batch; each leaf has it in the given dim."""
    dims = tuple(None if dim is None else dim % leaf.ndim for dim, leaf in zip(in_dims, leaves, strict=True))
    axes = tuple(
        _free_axes(leaf._spec.dims[dim], spec.pspec) if dim is not None and isinstance(leaf, DTensor) else ()
        for dim, leaf, spec in zip(dims, leaves, function.in_specs, strict=True)
    )
    batched = function.batched(dims, info.batch_size, info.randomness, axes)
    return tuple(_Call.apply(batched, draws, *leaves))  # type: ignore[no-untyped-call]


def run(program: Program, leaves: Sequence[torch.Tensor]) -> list[DTensor]:
    """Run a program on plain tensors and DTensors; those with other specs are moved."""
    with temporarily_clear_interpreter_stack():
        shards = [
            leaf._shards if isinstance(leaf, DTensor) and leaf._spec == spec else place(leaf, spec)._shards
            for leaf, spec in zip(leaves, program.in_specs, strict=True)
        ]
        return program(shards)


def _is_continuous(meta: TensorMeta) -> bool:
    return meta.dtype.is_floating_point or meta.dtype.is_complex


def _complete(spec: DTensorSpec) -> DTensorSpec:
    """The spec with nothing pending."""
    return attrs.evolve(spec, partial=())


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
