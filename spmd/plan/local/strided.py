"""Local tensors with their strides, by which operators return views or copies of them; no tensor is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import _disable_current_modes

from spmd.collectives.local import run_local
from spmd.core.mesh import Mesh
from spmd.core.spec import TensorMeta
from spmd.ir.graph import Form, Operation, Value, iterate_leaves, map_leaves
from spmd.ir.operator_kinds import VIEWS
from spmd.ir.simplify import identity

aten = torch.ops.aten

RESHAPE = aten.reshape.default

_TO_PARTIAL = torch.ops.spmd.to_partial.default


def as_reshape(operation: Operation) -> Operation:
    """An operation as lowered: a view is a reshape, because a shard may have other strides than the global tensor, or
    than the operands with which a local implementation was traced."""
    return attrs.evolve(operation, op=RESHAPE) if operation.op in VIEWS else operation


@lru_cache(maxsize=16384)
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


@attrs.frozen
class Strided:
    """The properties of a local tensor that decide whether an operator returns a view of it."""

    meta: TensorMeta
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, meta: TensorMeta) -> Strided:
        """A tensor in row-major order."""
        return cls(meta, _row_major(meta.shape))

    @property
    def is_contiguous(self) -> bool:
        """Whether elements are in row-major order without gaps; strides of dims of length 1 do not matter."""
        expected = _row_major(self.meta.shape)
        if self.strides == expected:
            return True
        dims = zip(self.meta.shape, self.strides, expected, strict=True)
        return self.meta.numel < 2 or all(size == 1 or stride == other for size, stride, other in dims)

    def tensor(self) -> torch.Tensor:
        """A new tensor like it on the meta device."""
        return torch.empty_strided(self.meta.shape, self.strides, dtype=self.meta.dtype, device="meta")


@attrs.frozen
class Result:
    """A result of an operator: its strides, and the position of the operand that it is a view of, if it is one."""

    layout: Strided
    view_of: int | None = None


@attrs.frozen
class StridedCall:
    """A call on local tensors, as a cache key: equal calls have results with equal strides and views.

    Args:
        form: the operator with its arguments.
        operands: the tensors among them.
        results: the shapes and dtypes of the results.
    """

    form: Form
    operands: tuple[Strided, ...]
    results: tuple[TensorMeta, ...]

    @classmethod
    def of(cls, operation: Operation, operands: Sequence[Strided]) -> StridedCall:
        """The call of an operation on tensors with these strides, in the order of its operands."""
        return cls(operation.form, tuple(operands), tuple(value.meta for value in operation.tensors))


def results_of(
    operation: Operation, layouts: Mapping[Value, Strided], place: tuple[Mesh, int] | None = None
) -> tuple[Result, ...]:
    """The results of an operation on tensors with these strides.

    Args:
        operation: the operation.
        layouts: the strides of its operands.
        place: as for `_run_on_meta`.
    """
    operands = operation.operands
    if not operands or operation.effect is not None or operation.op is _TO_PARTIAL:
        return _fresh(operation)
    same = identity(operation)
    if same is not None:  # lowering removes it
        return (Result(layouts[same], operands.index(same)),)
    given = [layouts[value] for value in operands]
    if _is_pointwise(operation.op) and all(layout.is_contiguous for layout in given):
        return _fresh(operation)
    return _run_on_meta(StridedCall.of(operation, given), place) or _fresh(operation)


def _fresh(operation: Operation) -> tuple[Result, ...]:
    """New tensors in row-major order."""
    return tuple([_result(value.meta) for value in operation.tensors])


@lru_cache(maxsize=16384)
def _result(meta: TensorMeta) -> Result:
    return Result(Strided.contiguous(meta))


@lru_cache(maxsize=4096)
def _is_pointwise(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags


@lru_cache(maxsize=16384)
def _run_on_meta(call: StridedCall, place: tuple[Mesh, int] | None) -> tuple[Result, ...] | None:
    """The strides of the results and which are views; None if the operator does not run on meta tensors.

    Args:
        call: the call.
        place: of a primitive without communication, the mesh and the number of the rank.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():  # the user's modes are not to see planning
        operands = [layout.tensor() for layout in call.operands]

        def concrete(leaf: Any) -> Any:
            return torch.device("meta") if isinstance(leaf, torch.device) else leaf

        op = call.form.op
        args, kwargs = map_leaves(concrete, call.form.filled(operands))
        try:
            made = op(*args, **kwargs) if place is None else run_local(op, *place, *args)
        except (NotImplementedError, RuntimeError):
            return None
        tensors = [leaf for leaf in iterate_leaves(made) if leaf is not None]
        if [TensorMeta.of(tensor) for tensor in tensors] != list(call.results):
            return None
        numbers = {storage_of(tensor): number for number, tensor in enumerate(operands)}
        return tuple(
            Result(Strided(meta, tensor.stride()), numbers.get(storage_of(tensor)))
            for tensor, meta in zip(tensors, call.results, strict=True)
        )


def storage_of(tensor: torch.Tensor) -> int:
    """What tests whether two tensors that exist share their memory."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
