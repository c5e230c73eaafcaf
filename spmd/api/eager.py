"""Operators on DTensors outside of `spmd.jit`: each is a cached program of one operator, planned for its specs.

The planner takes computation as free here: an operand is moved only where its operator cannot run on the shards, and a
result lies as it comes out, with no reduction pending. Results of `zeros_like` and its kin have the spec of their
operand. An operator that writes to a tensor gives it new shards of the same spec (`spmd.api.families`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import attrs
import optree
import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from spmd.api.distribute import place
from spmd.api.dtensor import DTensor, dispatch_operators_to, wrap
from spmd.api.families import Step, add_alias, add_view, view_of, write
from spmd.api.options import Options
from spmd.api.program import Program, StandIn
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import MeshError, ShardingError, TraceError
from spmd.ir.graph import iterate_leaves, map_leaves
from spmd.runtime.torch_settings import torch_settings
from spmd.tracing.recorder import where
from spmd.tracing.trace import Traced, is_tracing, trace_flat

aten = torch.ops.aten

MAX_OPERATORS = 4096
"""The most programs of one operator that are kept; the least recently used goes first."""

_META = torch.device("meta")

_replicates: ContextVar[bool] = ContextVar("spmd_implicit_replication", default=False)


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """A context in which plain tensors may be operands beside DTensors; they count as replicated.

    On a distributed mesh each rank must have the same values; this is not checked.

    >>> from spmd import P, distribute, make_mesh
    >>> x = distribute(torch.arange(3), P("data"), make_mesh({"data": 2}, runtime="virtual"))
    >>> with implicit_replication():
    ...     (x + torch.ones(3, dtype=torch.int64)).full_tensor()
    tensor([1, 2, 3])
    """
    token = _replicates.set(True)
    try:
        yield
    finally:
        _replicates.reset(token)


@attrs.frozen
class _Slot:
    """Stands for a tensor in the arguments of a call: its number among them."""

    number: int


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@attrs.frozen(cache_hash=True)
class _Step:
    """An operator that makes a view of its first tensor.

    Args:
        op: the operator.
        key: its arguments, hashable; a tensor is its `_Slot`.
        number: the number of the view among its results; None if it returns one tensor.
        arguments: its arguments; a tensor is its `_Slot`.
    """

    op: torch._ops.OpOverload
    key: Hashable
    number: int | None
    arguments: _Arguments = attrs.field(eq=False)

    def __call__(self, base: torch.Tensor) -> torch.Tensor:
        args, kwargs = map_leaves(lambda leaf: base if isinstance(leaf, _Slot) else leaf, self.arguments)
        result = self.op(*args, **kwargs)
        return result if self.number is None else result[self.number]  # type: ignore[no-any-return]


@attrs.frozen
class _WrittenView:
    """A view that an operator writes to: its number among the tensors, that of its base, the steps to it from there."""

    number: int
    base: int
    steps: tuple[Step, ...]


@attrs.frozen(cache_hash=True)
class _Call:
    """A call of an operator, without the values of its tensors; equal calls run the same program.

    Args:
        op: the operator.
        key: the arguments, hashable; a tensor is its `_Slot`.
        specs: the spec of each tensor, and of the bases of views that it writes to.
        settings: torch's settings that a program depends on.
        written: the numbers of the tensors that the operator writes to.
        views: those of them that are views.
        arguments: the positional and the keyword arguments; a tensor is its `_Slot`.
    """

    op: torch._ops.OpOverload
    key: Hashable
    specs: tuple[DTensorSpec, ...]
    settings: tuple[Any, ...]
    written: tuple[int, ...]
    views: tuple[_WrittenView, ...]
    arguments: _Arguments = attrs.field(eq=False)

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
        args, kwargs = map_leaves(lambda leaf: held[leaf.number] if isinstance(leaf, _Slot) else leaf, self.arguments)
        result = self.op(*args, **kwargs)
        return result, [held[number] for number in self.written], [held[number] for number in self.bases]


@dispatch_operators_to
def run_operator(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator of which some tensors are DTensors, as torch calls `__torch_dispatch__`.

    Raises:
        MeshError: DTensors on several meshes.
        ShardingError: a plain tensor beside a DTensor.
        TraceError: a shape that depends on values, or a DTensor that a function under `spmd.jit` closes over.
    """
    if peek_interpreter_stack() is None:
        return _run(op, args, kwargs)
    with temporarily_clear_interpreter_stack():  # transforms would wrap plain tensors, too
        return _run(op, args, kwargs)


def _run(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if op in _DIRECT:
        return _DIRECT[op](*args)
    if kwargs.get("device") == _META:
        return op(*map(_as_meta, args), **kwargs)
    tensors: list[torch.Tensor] = []
    arguments: _Arguments = map_leaves(functools.partial(_slot, tensors), (args, dict(kwargs)))
    _refuse_trace(op, tensors)
    if any(tensor.is_meta for tensor in tensors):  # torch asks for shapes: of tangents that are zero, for example
        args, kwargs = map_leaves(_as_meta, (args, dict(kwargs)))
        return op(*args, **kwargs)
    held = _on_one_mesh(op, tensors)
    written = _written(op, arguments)
    views = _written_views(written, held)
    key = _key(arguments)
    call = _Call(op, key, tuple(tensor._spec for tensor in held), torch_settings(), written, views, arguments)
    operator = _operator(call)
    results = operator.program([tensor._shards for tensor in held])
    if written:
        return _write(call, operator, held, results)
    found = operator.tree.unflatten(results)
    if _returns(op, written=False):
        several = isinstance(found, (tuple, list))
        for number, result in enumerate(results):
            add_view(held[0], result, _Step(op, key, number if several else None, arguments))
    return found


def _write(call: _Call, operator: _Operator, held: Sequence[DTensor], results: Sequence[DTensor]) -> Any:
    """Give what an operator writes to its new shards; returns what the operator returns."""
    count = len(call.written)
    for number, base in zip(call.bases, results[count:], strict=False):
        write(held[number], base._shards)
    for number, value in zip(call.written, results, strict=False):
        write(held[number], value._shards)
    if _returns(call.op, written=True):
        values = [held[number] for number in call.written]
        return values[0] if len(call.op._schema.returns) == 1 else tuple(values)
    return operator.tree.unflatten(results[count + len(call.bases) :])


def _returns(op: torch._ops.OpOverload, *, written: bool) -> bool:
    """Whether an operator returns arguments that it wrote to; or, if not `written`, views of an argument."""
    return any(found.alias_info is not None and found.alias_info.is_write is written for found in op._schema.returns)


def _as_meta(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=_META) if isinstance(leaf, DTensor) else leaf


def _slot(tensors: list[torch.Tensor], leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensors.append(leaf)
    return _Slot(len(tensors) - 1)


def _written_views(written: Sequence[int], held: list[DTensor]) -> tuple[_WrittenView, ...]:
    """The views among tensors that are written to; their bases are added to `held`."""
    found = []
    for number in written:
        view = view_of(held[number])
        if view is not None and not view.overlaps(held[number]):
            place = next((n for n, tensor in enumerate(held) if n not in written and tensor is view.base), len(held))
            if place == len(held):
                held.append(view.base)
            found.append(_WrittenView(number, place, view.steps))
    return tuple(found)


def _key(arguments: Any) -> Hashable:
    """The arguments as a hashable key, in which 1, 1.0 and True differ, and 0.0 and -0.0."""
    if isinstance(arguments, (tuple, list)):
        return tuple(map(_key, arguments))
    if isinstance(arguments, dict):
        return tuple((name, _key(arguments[name])) for name in sorted(arguments))
    if isinstance(arguments, (float, complex)):
        return type(arguments), repr(arguments)
    return type(arguments), arguments


def _refuse_trace(op: Any, tensors: Sequence[torch.Tensor]) -> None:
    if is_tracing():
        value = next(tensor for tensor in tensors if isinstance(tensor, DTensor))
        raise TraceError(
            f"{op} at {where()} was called on {value}, which the function under spmd.jit closes over. "
            "Pass it as an argument."
        )


def _on_one_mesh(op: Any, tensors: Sequence[torch.Tensor]) -> list[DTensor]:
    """The tensors of a call as DTensors on one mesh; plain ones are replicated where that is allowed."""
    mesh = next(tensor for tensor in tensors if isinstance(tensor, DTensor)).mesh
    return [_on_mesh(op, tensor, mesh) for tensor in tensors]


def _on_mesh(op: Any, tensor: torch.Tensor, mesh: Mesh) -> DTensor:
    if isinstance(tensor, DTensor):
        if tensor.mesh != mesh:
            raise MeshError(
                f"{op} at {where()} has operands on {mesh} and on {tensor.mesh}. Move one of them: "
                "spmd.distribute(x.full_tensor(), spec, mesh)."
            )
        return tensor
    meta = TensorMeta.of(tensor)
    is_number = tensor.numel() == 1 or not any(tensor.stride())  # torch's gradients have such: numbers, expanded
    if not is_number and not _replicates.get():
        raise ShardingError(
            f"{op} at {where()} has a plain tensor {meta} beside a DTensor on {mesh}. Place it with "
            "spmd.distribute(x, spec, mesh), or let plain tensors count as replicated: with "
            "spmd.implicit_replication(). Numbers and 0-d tensors need neither."
        )
    return place(tensor, DTensorSpec.replicated(mesh, meta), f"an operand of {op}")


class _Operator:
    """The program of a call, compiled.

    Its outputs are the new values of the tensors that the operator writes to, of the bases of those that are views, and
    the results that are none of these.

    Args:
        call: the call.
    """

    def __init__(self, call: _Call) -> None:
        mesh = call.specs[0].mesh
        self.tree: optree.PyTreeSpec = optree.tree_structure(None)
        stand_ins = [StandIn(spec.meta, mesh.device) for spec in call.specs]
        graph = trace_flat(functools.partial(self._flat, call), stand_ins)
        given = [call.specs[number] for number in (*call.written, *call.bases)]
        metas = [value.meta for value in graph.outputs[len(given) :]]
        out_specs = (*given, *(_like(call, meta) for meta in metas))
        self.program = Program(Traced.flat(graph, str(call.op)), mesh, call.specs, out_specs, frozenset(), _options())
        self.program.prepare()

    def _flat(self, call: _Call, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The operator as a function that writes to nothing."""
        result, written, bases = call.run(tensors)
        leaves, self.tree = optree.tree_flatten(None if _returns(call.op, written=True) else result)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise ShardingError(
                f"{call.op} at {where()} returns what is no tensor, {result!r:.80}, of a DTensor. Call it on the whole "
                "tensor: .full_tensor()."
            )
        return [*written, *bases, *leaves]


_operator = functools.lru_cache(maxsize=MAX_OPERATORS)(_Operator)


@functools.cache
def _options() -> Options:
    from spmd.plan.machine.machine import Machine  # at the first operator, not by `import spmd`

    machine = Machine(flops=1e30, memory_bandwidth=1e30)
    return Options(static_argnums=(), donate_argnums=(), comms="allow", backend="eager", machine=machine, rules=None)


def _written(op: torch._ops.OpOverload, arguments: _Arguments) -> tuple[int, ...]:
    """The numbers of the tensors that an operator writes to."""
    found: dict[int, None] = {}
    args, kwargs = arguments
    for position, name in _written_arguments(op):
        for leaf in iterate_leaves(args[position] if position < len(args) else kwargs.get(name)):
            if isinstance(leaf, _Slot):
                found[leaf.number] = None
    return tuple(found)


@functools.cache
def _written_arguments(op: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """The position and the name of each argument that an operator writes to."""
    arguments = enumerate(op._schema.arguments)
    unsaid = _WRITES_UNSAID.get(op, ())
    return tuple(
        (n, a.name) for n, a in arguments if a.name in unsaid or (a.alias_info is not None and a.alias_info.is_write)
    )


_WRITES_UNSAID = {aten.native_batch_norm.default: ("running_mean", "running_var")}
"""Arguments that an operator writes to although its schema does not say so."""


_LIKE = frozenset(
    {
        aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.rand_like, aten.randn_like,
        aten.randint_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty,
    }
)  # fmt: skip
"""Operators whose results do not depend on the values of their operand, and have its spec if they have its shape."""


def _like(call: _Call, meta: TensorMeta) -> DTensorSpec | None:
    """The given spec of a result: that of the operand if it is like it; else None."""
    held = call.specs[0]
    if call.op.overloadpacket not in _LIKE or held.partial or held.meta.shape != meta.shape:
        return None
    return attrs.evolve(held, meta=meta)


def _item(value: DTensor) -> Any:
    """The Python number of a tensor of one element, assembled."""
    return (value._shards[0] if value._spec.is_replicated else value.full_tensor()).item()


def _equal(value: torch.Tensor, other: torch.Tensor) -> bool:
    return value.shape == other.shape and bool((value == other).all().item())


def _alias(value: DTensor) -> DTensor:
    made = wrap(value._spec, value._shards)
    add_alias(value, made)
    return made


_DIRECT: Mapping[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _item,
    aten.item.default: _item,
    aten.is_nonzero.default: lambda value: bool(_item(value)),
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.equal.default: _equal,
    aten.is_same_size.default: lambda value, other: value.shape == other.shape,
    aten._has_same_storage_numel.default: lambda value, other: value.numel() == other.numel(),
}
"""Operators that need no program."""
