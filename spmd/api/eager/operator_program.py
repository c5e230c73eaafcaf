"""One operator on DTensors as a program: what a call of it is, and the program, compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import optree
import torch

from spmd.api.eager.families import Step, add_view, write
from spmd.api.eager.operators import is_elementwise, name_of, returns_arguments
from spmd.api.programs.options import Options
from spmd.api.programs.program import Program, StandIn
from spmd.api.values.communication import is_watched, record_program
from spmd.api.values.dtensor import DTensor, wrap
from spmd.api.values.wrapper import Shards, replace_shards
from spmd.core.compile_lock import COMPILING
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import ShardingError
from spmd.ir.graph import Graph, freeze, iterate_leaves, map_leaves
from spmd.ir.operator_kinds import LIKE
from spmd.runtime.bindings import callable_of
from spmd.runtime.codegen import name_origin
from spmd.tracing.source import where
from spmd.tracing.trace import strides_of, trace_flat
from spmd.tracing.traced import Traced

aten = torch.ops.aten


@attrs.frozen
class Slot:
    """Stands for a tensor in the arguments of a call: its number among them."""

    number: int


Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@attrs.frozen(cache_hash=True)
class ViewStep:
    """An operator that makes a view of its first tensor.

    Args:
        op: the operator.
        key: its arguments, hashable; a tensor is its `Slot`.
        number: the number of the view among its results; None if it returns one tensor.
        arguments: its arguments; a tensor is its `Slot`.
    """

    op: torch._ops.OpOverload
    key: Hashable
    number: int | None
    arguments: Arguments = attrs.field(eq=False)

    def __call__(self, base: torch.Tensor) -> torch.Tensor:
        args, kwargs = map_leaves(lambda leaf: base if isinstance(leaf, Slot) else leaf, self.arguments)
        result = self.op(*args, **kwargs)
        return result if self.number is None else result[self.number]  # type: ignore[no-any-return]


@attrs.frozen
class WrittenView:
    """A view that an operator writes to: its number among the tensors, that of its base, the steps to it from there."""

    number: int
    base: int
    steps: tuple[Step, ...]


@attrs.frozen(cache_hash=True)
class OperatorCall:
    """A call of an operator, without the values of its tensors; equal calls run the same program.

    Args:
        op: the operator.
        key: the arguments, hashable; a tensor is its `Slot`.
        specs: the spec of each tensor, and of the bases of views that it writes to.
        strides: their strides; None for those that are contiguous.
        settings: torch's settings that a program depends on.
        written: the numbers of the tensors that the operator writes to.
        views: those of them that are views.
        arguments: the positional and the keyword arguments; a tensor is its `Slot`.
    """

    op: torch._ops.OpOverload
    key: Hashable
    specs: tuple[DTensorSpec, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    settings: tuple[Any, ...]
    written: tuple[int, ...]
    views: tuple[WrittenView, ...]
    arguments: Arguments = attrs.field(eq=False)

    @property
    def bases(self) -> tuple[int, ...]:
        """The numbers of the bases of views."""
        return tuple(dict.fromkeys(view.base for view in self.views))

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
        """Run the operator on copies of what it writes to.

        Returns:
            The result, the tensors that it wrote to, and the bases of those that are views.
        """
        held = list(tensors)
        for number in (*self.written, *self.bases):
            held[number] = held[number].clone()
        for view in self.views:
            held[view.number] = functools.reduce(lambda base, step: step(base), view.steps, held[view.base])
        args, kwargs = map_leaves(lambda leaf: held[leaf.number] if isinstance(leaf, Slot) else leaf, self.arguments)
        result = self.op(*args, **kwargs)
        return result, [held[number] for number in self.written], [held[number] for number in self.bases]


class Operator:
    """The program of a call, compiled.

    Its outputs are the new values of the tensors that the operator writes to, of the bases of those that are views, and
    the results that are none of these.

    Args:
        call: the call.
    """

    def __init__(self, call: OperatorCall) -> None:
        self.call, mesh = call, call.specs[0].mesh
        self.tree: optree.PyTreeSpec = optree.tree_structure(None)
        stand_ins = [
            StandIn(spec.meta, mesh.device, strides) for spec, strides in zip(call.specs, call.strides, strict=True)
        ]
        self._strides: list[tuple[int, ...] | None] = []
        self._offsets: list[int] = []
        graph = trace_flat(functools.partial(self._flat, call), stand_ins)
        given = [call.specs[number] for number in (*call.written, *call.bases)]
        for spec, value in zip(given, graph.outputs, strict=False):
            if spec.meta != value.meta:
                raise ShardingError(
                    f"{call.op} at {where()} makes {value.meta} of a DTensor {spec}, whose shape and dtype are fixed. "
                    "Take the result of an operator that does not write in place."
                )
        metas = [value.meta for value in graph.outputs[len(given) :]]
        out_specs = (*given, *(_like(call, meta) for meta in metas))
        self.program = Program(Traced.flat(graph, str(call.op)), mesh, call.specs, out_specs, frozenset(), _options())
        self.program.prepare()
        self._executable, self._out_specs = self.program.compile(), self.program.out_specs
        self.kernel, self._ranks = self._only_operator(), range(len(mesh.held_coordinates))
        self._run_on_shards = self._kernel_function()
        self._functions = () if self.program.local.collectives else self._executable.functions
        self.is_compared = not self.program.local.collectives  # ranks need not make a call that sends nothing
        self._views, self._is_single = self._view_steps(), self.tree.is_leaf()

    def _only_operator(self) -> torch._ops.OpOverload | None:
        """What every rank calls on its shards with the call's other arguments, if that is all it does; else None."""
        if any(isinstance(leaf, Slot) for leaf in iterate_leaves(self.call.arguments[1])):
            return None  # the kernel's keyword arguments are passed on as they are
        program = self.program.local
        found = {_only_operator(program.graph(where), self.call) for where in program.mesh.held_coordinates}
        return found.pop() if len(found) == 1 else None

    def _kernel_function(self) -> Callable[..., Any]:
        """The kernel, as a function of local tensors and the call's other arguments."""
        (coordinate, *_), specs = self.program.mesh.held_coordinates, self.call.specs
        metas = [TensorMeta(spec.local_shape(coordinate), spec.meta.dtype) for spec in specs]
        local = lambda leaf: metas[leaf.number] if isinstance(leaf, Slot) else leaf  # noqa: E731
        return callable_of(self.kernel, *map_leaves(local, self.call.arguments))

    def _view_steps(self) -> list[ViewStep]:
        """For each result, what makes it a view of the first tensor; empty if results are no views."""
        call = self.call
        if not returns_arguments(call.op, written=False):
            return []
        several = range(self.tree.num_leaves) if not self.tree.is_leaf() else (None,)
        return [ViewStep(call.op, call.key, number, call.arguments) for number in several]

    def __call__(
        self, held: Sequence[DTensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None, *, modes_off: bool = True
    ) -> Any:
        """Run it.

        Args:
            held: the DTensors of the call, and the bases of views that it writes to.
            args, kwargs: its arguments, with DTensors for all tensors.
            modes_off: `spmd.runtime.torch_settings.are_modes_off()`; a kernel would see autocast again.
        """
        if not modes_off:
            shards = self._run_program(held)
        elif self.kernel is not None:
            shards = self._run_kernel(held, args, kwargs)
        else:
            shards = self._run_functions(held) if self._functions else self._run_program(held)
        if self.call.written:
            return self._write(held, shards)
        if self._views:
            if self._is_single:
                return self._view(held[0], 0, shards[0])
            return self.tree.unflatten(self._view(held[0], number, shard) for number, shard in enumerate(shards))
        if self._is_single:
            return wrap(self._out_specs[0], shards[0], self._strides[0])
        return self.tree.unflatten(map(wrap, self._out_specs, shards, self._strides))

    def _view(self, base: DTensor, number: int, shards: Shards) -> DTensor:
        """A result that is a view of a tensor."""
        offset = int(base.storage_offset()) + self._offsets[number]
        view = wrap(self._out_specs[number], shards, self._strides[number], offset)
        add_view(base, view, self._views[number])
        return view

    def _run_kernel(
        self, held: Sequence[DTensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Sequence[Shards]:
        """The shards of all outputs, by the kernel."""
        run, found = self._run_on_shards, []
        for rank in self._ranks:
            local = [leaf._shards[rank] if type(leaf) is DTensor else _shard(leaf, rank) for leaf in args]
            found.append(run(*local, **kwargs) if kwargs else run(*local))
        return (tuple(found),) if isinstance(found[0], torch.Tensor) else list(zip(*found, strict=True))

    def _run_functions(self, held: Sequence[DTensor]) -> Sequence[Shards]:
        """The shards of all outputs, by programs of which none waits for another."""
        try:
            if len(self._functions) == 1:
                return [(shard,) for shard in self._functions[0]([value._shards[0] for value in held])]
            found = [function([value._shards[rank] for value in held]) for rank, function in enumerate(self._functions)]
        except Exception as error:
            name_origin(error)
            raise
        return list(zip(*found, strict=True))

    def _run_program(self, held: Sequence[DTensor]) -> Sequence[Shards]:
        """The shards of all outputs, by the program."""
        if is_watched():
            collectives, moves = self.program.local.collectives, self.program.plan.suspicious_moves
            record_program(collectives, str(self.call.op), moves)
        return self._executable([value._shards for value in held])

    def _write(self, held: Sequence[DTensor], shards: Sequence[Shards]) -> Any:
        """Give what the operator writes to its new shards; returns what the operator returns."""
        call, count = self.call, len(self.call.written)
        for number, base in zip(call.bases, shards[count:], strict=False):
            write(held[number], base)
        through = {view.number for view in call.views}
        for number, value in zip(call.written, shards, strict=False):
            if held[number]._family is None:
                replace_shards(held[number], value)
            else:
                write(held[number], value, through=number in through)
        if returns_arguments(call.op, written=True):
            values = [held[number] for number in call.written]
            return values[0] if len(call.op._schema.returns) == 1 else tuple(values)
        given = count + len(call.bases)
        return self.tree.unflatten(map(wrap, self._out_specs[given:], shards[given:], self._strides))

    def _flat(self, call: OperatorCall, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The operator as a function that writes to nothing."""
        result, written, bases = call.run(tensors)
        leaves, self.tree = optree.tree_flatten(None if returns_arguments(call.op, written=True) else result)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise ShardingError(
                f"{call.op} at {where()} returns what is no tensor, {result!r:.80}, of a DTensor. Call it on the whole "
                "tensor: .full_tensor()."
            )
        for leaf in leaves:
            refuse_layout(call.op, leaf.layout)
        self._strides = [strides_of(leaf) for leaf in leaves]
        self._offsets = [leaf.storage_offset() for leaf in leaves]
        return [*written, *bases, *leaves]


def refuse_layout(op: torch._ops.OpOverload, layout: torch.layout | None) -> None:
    """Raise a ShardingError if an operator makes a tensor that is not dense, or is quantized."""
    if layout not in (None, torch.strided):
        raise ShardingError(
            f"{op} at {where()} makes a tensor of layout {layout} of a DTensor, and DTensors are dense. Gradients of "
            "embeddings are dense with sparse=False; a whole tensor becomes sparse by x.full_tensor().to_sparse()."
        )
    if name_of(op).startswith(("quantize_per_", "_make_per_")):
        raise ShardingError(
            f"{op} at {where()} makes a quantized tensor of a DTensor, and DTensors are not. To round as it does: "
            "torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, 255); a whole tensor is x.full_tensor()."
        )


def _shard(leaf: Any, rank: int) -> Any:
    """An argument that is no DTensor, with the shards of a rank for DTensors in it."""
    is_list = type(leaf) is list or type(leaf) is tuple
    if not is_list or not leaf or type(leaf[0]) is int:
        return leaf
    return [item._shards[rank] if type(item) is DTensor else _shard(item, rank) for item in leaf]


def _only_operator(graph: Graph, call: OperatorCall) -> torch._ops.OpOverload | None:
    """The operator of a rank's program that is that operator alone, with the arguments of the call."""
    operations = graph.operations
    if graph.constants or not all(isinstance(operation.op, torch._ops.OpOverload) for operation in operations):
        return None
    if is_elementwise(call.op):  # on lists, parts of them by their specs, or items: what it computes is the same
        name = name_of(call.op)
        named = all(name_of(operation.op) in (name, name.removeprefix("_foreach_")) for operation in operations)
        direct = all(set(operation.operands) <= set(graph.inputs) for operation in operations)
        return getattr(getattr(aten, name), call.op._overloadname) if named and direct else None
    if len(operations) != 1 or name_of(operations[0].op) != name_of(call.op):
        return None
    (operation,), slots = operations, {value: Slot(number) for number, value in enumerate(graph.inputs)}
    if operation.effect is not None or operation.results != graph.outputs:
        return None
    given = map_leaves(lambda leaf: slots.get(leaf, leaf), (operation.args, dict(operation.kwargs)))
    return operation.op if _named(operation.op, given) == _named(operation.op, call.arguments) else None


def _named(op: torch._ops.OpOverload, arguments: Arguments) -> Hashable:
    """The arguments of a call by name, with defaults, as a hashable key."""
    parameters = op._schema.arguments
    defaults = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}
    given = {parameter.name: value for parameter, value in zip(parameters, arguments[0], strict=False)}
    return freeze({**defaults, **given, **arguments[1]})


@functools.cache
def _options() -> Options:
    with COMPILING:
        from spmd.plan.machine.machine import Machine  # at the first operator, not by `import spmd`

    machine = Machine(flops=1e30, memory_bandwidth=1e30)
    return Options(static_argnums=(), donate_argnums=(), comms="allow", backend="eager", machine=machine, rules=None)


def slot_numbers(places: Sequence[tuple[int, str]], arguments: Arguments) -> tuple[int, ...]:
    """The numbers of the tensors of arguments that are given by their positions and names."""
    found: dict[int, None] = {}
    args, kwargs = arguments
    for position, name in places:
        for leaf in iterate_leaves(args[position] if position < len(args) else kwargs.get(name)):
            if isinstance(leaf, Slot):
                found[leaf.number] = None
    return tuple(found)


def _like(call: OperatorCall, meta: TensorMeta) -> DTensorSpec | None:
    """The given spec of a result: that of the operand if it is like it; else None."""
    held = call.specs[0]
    if call.op not in LIKE or held.partial or held.meta.shape != meta.shape:
        return None
    return attrs.evolve(held, meta=meta)
