"""Operators on DTensors outside of `spmd.jit`: each is a cached program of one operator, planned for its specs.

The planner takes computation as free here: an operand is moved only where its operator cannot run on the shards, and a
result has the spec that it comes out with, with no reduction pending. Results of `zeros_like` and its kin have the spec
of their operand. An operator that writes to a tensor gives it new shards of the same spec (`spmd.api.eager.families`).
One whose result depends on values has no program: each rank computes it of whole tensors (`whole_operator`).

A call whose like was seen before goes by a key straight to what runs: the operator on the shards of each rank, if that
is all that its program does, else the compiled program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._mode_utils import no_dispatch

from spmd.api.eager.composites import pack
from spmd.api.eager.families import add_alias, view_of
from spmd.api.eager.gradient_scaling import unscale
from spmd.api.eager.operator_cache import find, program_of, remember
from spmd.api.eager.operator_program import Arguments, OperatorCall, Slot, WrittenView, refuse_layout, slot_numbers
from spmd.api.eager.operators import index_arguments, is_listed, overwritten_arguments, written_arguments
from spmd.api.eager.plain_copies import placed_as
from spmd.api.eager.plain_operands import Roles, implicit_replication, on_one_mesh, write_plain
from spmd.api.eager.plain_tensors import is_number
from spmd.api.eager.recurrent import lstm_layer, lstm_layer_backward
from spmd.api.values.dtensor import DTensor, become, dispatch_operators_to, set_family, share_data, wrap
from spmd.core.mesh import Mesh
from spmd.errors import ShardingError, TraceError
from spmd.ir.graph import freeze, map_leaves
from spmd.ir.operator_kinds import FILLS_IN_PLACE, INDEXED_WRITES
from spmd.job import checks
from spmd.runtime.torch_settings import are_modes_off, torch_settings
from spmd.tracing.linearize import RecordingError, recorder
from spmd.tracing.running import is_tracing
from spmd.tracing.source import where

aten = torch.ops.aten

_META = torch.device("meta")


@dispatch_operators_to
def run_operator(
    cls: type[DTensor], op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Run an operator of which some tensors are DTensors: `DTensor.__torch_dispatch__`.

    Raises:
        MeshError: DTensors on several meshes.
        ShardingError: a plain tensor beside a DTensor, or one that is written to.
        TraceError: a DTensor that a function under `spmd.jit` closes over.
    """
    if recorder():
        raise RecordingError(
            f"{op} at {where()} was called on DTensors while make_fx records, which would take their shards as "
            "constants. Call the function itself, or use spmd.jit."
        )
    if peek_interpreter_stack() is not None:
        with temporarily_clear_interpreter_stack():  # transforms would wrap plain tensors, too
            return run_operator(cls, op, types, args, kwargs)
    if not is_tracing():
        operator, held = find(op, args, kwargs)
        if operator is not None:
            return operator(held, args, kwargs)
    return _run_new(op, args, kwargs or {})


def _run_new(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator whose call is seen for the first time, or needs more than the shards of DTensors."""
    if op in _DIRECT:
        return _DIRECT[op](*args, **kwargs)
    return _run_planned(op, args, kwargs)


def _run_planned(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator by its program, or whole where it has none."""
    if op in _RESHAPES:
        return _reshape_in_place(op, *args)
    if op is aten.as_strided.default and view_of(args[0]) is not None:
        return _as_strided_in_base(*args, **kwargs)
    if kwargs.get("device") == _META:
        return op(*map(_as_meta, args), **kwargs)
    refuse_layout(op, kwargs.get("layout"))
    meshes = _meshes(args) if is_listed(op) else ()
    if len(meshes) > 1:
        return _run_on_meshes(op, meshes, args, kwargs)
    if op in _CONVERTED and not is_tracing():
        args = (args[0], _CONVERTED[op](args[0], args[1]), *args[2:])
    tensors: list[torch.Tensor] = []
    arguments: Arguments = map_leaves(functools.partial(_slot, tensors), (tuple(args), dict(kwargs)))
    _refuse_trace(op, tensors)
    written = slot_numbers(written_arguments(op), arguments)
    if any(tensors[number].is_meta for number in written):
        args, kwargs = map_leaves(_as_meta, (tuple(args), dict(kwargs)))
        return op(*args, **kwargs)
    indexes, overwritten = (slot_numbers(of(op), arguments) for of in (index_arguments, overwritten_arguments))
    operands = on_one_mesh(op, tensors, Roles(indexes, written, overwritten))
    held = operands.placed
    if op in _BY_STEPS:
        args, _ = map_leaves(lambda leaf: held[leaf.number] if isinstance(leaf, Slot) else leaf, arguments)
        return _BY_STEPS[op](*args)
    views = _written_views(op, written, held)
    specs = tuple(value._spec for value in held)
    strides = tuple(value._strides for value in held)
    operator = program_of(
        OperatorCall(op, freeze(arguments), specs, strides, torch_settings(), written, views, arguments)
    )
    if all(given is placed for given, placed in zip(tensors, held, strict=False)):
        remember(operator, args, kwargs)
    elif checks.every_call or not operator.is_compared:
        operands.compare(op)
        operator.is_compared = True
    given = map_leaves(lambda leaf: held[leaf.number] if isinstance(leaf, Slot) else leaf, arguments)
    result = operator(held, *given, modes_off=are_modes_off())
    numbers = [number for number in written if tensors[number] is not held[number]]
    return write_plain(result, [(held[number], tensors[number]) for number in numbers]) if numbers else result


def _places(index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """The indexes of the elements that a plain mask keeps, so that a program knows how many; else the index itself."""
    if index is None or isinstance(index, DTensor) or index.is_meta or not index.ndim:
        return (index,)
    return index.nonzero().unbind(1) if index.dtype in (torch.bool, torch.uint8) else (index,)


def _meshes(args: Sequence[Any]) -> list[Mesh]:
    """The meshes of the DTensors in an operator's first list, in order; none if it has no list."""
    listed = next((arg for arg in args if isinstance(arg, (list, tuple))), ())
    return list(dict.fromkeys(item.mesh for item in listed if isinstance(item, DTensor)))


def _run_on_meshes(op: Any, meshes: Sequence[Mesh], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on lists, as optimizers do, for the items of one mesh after the other."""
    first = next(arg for arg in args if isinstance(arg, (list, tuple)))
    found: list[Any] = [None] * len(first)
    for mesh in meshes:
        here = [number for number, item in enumerate(first) if isinstance(item, DTensor) and item.mesh == mesh]
        given = [[arg[n] for n in here if n < len(arg)] if isinstance(arg, (list, tuple)) else arg for arg in args]
        results = op(*given, **kwargs)
        for number, result in zip(here, results or (), strict=False):
            found[number] = result
    return found if op._schema.returns else None


def _as_meta(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=_META) if isinstance(leaf, DTensor) else leaf


def _slot(tensors: list[torch.Tensor], leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensors.append(leaf)
    return Slot(len(tensors) - 1)


def _written_views(op: Any, written: Sequence[int], held: list[DTensor]) -> tuple[WrittenView, ...]:
    """The views among tensors that are written to; their bases are added to `held`.

    A view whose elements overlap is left out, unless all of them get the same value: torch refuses other writes, but a
    gradient that is such a view here has memory of its own there.
    """
    found = []
    for number in written:
        view = view_of(held[number])
        if view is not None and (op in FILLS_IN_PLACE or not view.overlaps(held[number])):
            place = next((n for n, tensor in enumerate(held) if n not in written and tensor is view.base), len(held))
            if place == len(held):
                held.append(view.base)
            found.append(WrittenView(number, place, view.steps))
    return tuple(found)


def _refuse_trace(op: Any, tensors: Sequence[torch.Tensor]) -> None:
    if is_tracing():
        value = next(tensor for tensor in tensors if isinstance(tensor, DTensor))
        raise TraceError(
            f"{op} at {where()} was called on {value!r}, which the function under spmd.jit closes over. "
            "Pass it as an argument."
        )


def _source(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The source of a copy to a DTensor: a plain tensor under its spec, but for numbers."""
    is_known = isinstance(source, DTensor) or source.is_meta or source.is_quantized or is_number(source)
    return placed_as(target, source) if isinstance(target, DTensor) and not is_known else source


def _item(value: DTensor) -> Any:
    """The Python number of a tensor of one element, assembled."""
    return (value._shards[0] if value._spec.is_replicated else value._whole()).item()


def _equal(value: torch.Tensor, other: torch.Tensor) -> bool:
    with implicit_replication():
        return value.shape == other.shape and bool((value == other).all().item())


def _allclose(
    value: torch.Tensor, other: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    with implicit_replication():
        return bool(torch.isclose(value, other, rtol, atol, equal_nan).all().item())


def _bincount(values: DTensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """`bincount`: numbers within `minlength` are counted where they are, others by each rank."""
    if minlength <= 0 or not values.numel() or values.ndim != 1 or values.is_floating_point():
        return _run_planned(aten.bincount.default, (values, weights, minlength), {})
    if values.amin().item() < 0 or values.amax().item() >= minlength:
        return _run_planned(aten.bincount.default, (values, weights, minlength), {})
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    counts = torch.ones_like(values, dtype=dtype) if weights is None else weights.to(dtype)
    return values.new_zeros(minlength, dtype=dtype).index_add(0, values, counts)


def _alias(value: DTensor) -> DTensor:
    made = wrap(value._spec, value._shards, value._strides)
    add_alias(value, made)
    return made


def _resize_(value: DTensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> DTensor:
    """A DTensor as it is: its shape is fixed, and its order in memory, but for one that is empty."""
    if not value.numel() and value._family is None:
        share_data(value, cast(DTensor, value.new_empty(size)))
        return value
    order = torch.contiguous_format if memory_format is None else memory_format
    if value.shape != torch.Size(size) or not (memory_format is None or value.is_contiguous(memory_format=order)):
        raise ShardingError(
            f"resize_ at {where()} of a DTensor {value._spec} to {list(size)} takes elements by their place in memory. "
            "Use x.reshape(...) or torch.nn.functional.pad."
        )
    return value


def _as_strided_in_base(
    value: DTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """`as_strided` of a view: its offset is that in the memory of the tensor that it is a view of."""
    offset = value.storage_offset() if storage_offset is None else storage_offset
    return view_of(value).base.as_strided(size, stride, offset)  # type: ignore[union-attr]


def _reshape_in_place(op: Any, value: DTensor, *args: Any) -> DTensor:
    """Change the shape of a DTensor itself; it becomes what the operator without `_` returns."""
    if value._family is not None:
        raise ShardingError(
            f"{op} at {where()} changes the shape of a DTensor {value._spec} that is a view, or of which there are "
            "views or aliases. Take the result of the operator without `_`."
        )
    found = _RESHAPES[op](value, *args)
    with no_dispatch():  # changes the wrapper, which has no data
        op(value, *args)
    become(value, found)
    set_family(value, None)  # `found` is no view of it, but what it is now
    return value


_RESHAPES: Mapping[Any, Any] = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
}
"""Operators that change the shape of their operand, and those that return a view instead."""


_CONVERTED: Mapping[Any, Callable[[Any, Any], Any]] = {
    aten.copy_.default: _source,
    aten._foreach_copy_.default: lambda targets, sources: list(map(_source, targets, sources)),
    **dict.fromkeys(
        (aten.index.Tensor, *INDEXED_WRITES),
        lambda _, indexes: [place for index in indexes for place in _places(index)],
    ),
}
"""Operators whose second argument is converted, by the first one and itself, where it is plain."""


_DIRECT: Mapping[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _item,
    aten.item.default: _item,
    aten.is_nonzero.default: lambda value: bool(_item(value)),
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten._amp_foreach_non_finite_check_and_unscale_.default: unscale,
    aten.allclose.default: _allclose,
    aten.bincount.default: _bincount,
    aten._pack_padded_sequence.default: pack,
    aten.equal.default: _equal,
    aten.resize_.default: _resize_,
    aten.resize_as_.default: lambda value, other, **options: value.resize_(other.shape, **options),
    aten.is_same_size.default: lambda value, other: value.shape == other.shape,
    aten._has_same_storage_numel.default: lambda value, other: value.numel() == other.numel(),
}
"""Operators that need no program."""

_BY_STEPS: Mapping[Any, Callable[..., Any]] = {
    aten.mkldnn_rnn_layer.default: lstm_layer,
    aten.mkldnn_rnn_layer_backward.default: lstm_layer_backward,
}
"""Operators that are run by others."""
