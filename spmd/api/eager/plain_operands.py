"""Plain tensors among the operands of an operator on DTensors: which may be there, and what is written to them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import attrs
import torch

from spmd.api.eager.plain_tensors import check_replicas, is_backward, is_number, refusal, remember
from spmd.api.values.distribute import check_placeable, check_same, place
from spmd.api.values.dtensor import DTensor, wrap
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import MeshError, ShardingError
from spmd.ir.graph import map_leaves
from spmd.tracing.recorder import where

_replicates: ContextVar[bool] = ContextVar("spmd_implicit_replication", default=False)


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """A context in which plain tensors may be operands beside DTensors; they count as replicated.

    On a distributed mesh each rank must have the same values. Ranks compare them at the first call of an operator with
    such specs, if it communicates, and by `spmd.init(check="calls")` at each.

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
class Operands:
    """The tensors of a call as DTensors on one mesh.

    Args:
        placed: the DTensors; plain tensors are replicated.
        given: the plain tensors that ranks compare with the call, by what they are: all but numbers, what torch made,
            and what is overwritten.
    """

    placed: list[DTensor]
    given: Mapping[str, torch.Tensor]

    def compare(self, op: Any) -> None:
        """Check that all ranks have the same plain tensors."""
        if self.given:
            mesh = self.placed[0].mesh
            check_same(f"{op} with plain tensors on {mesh}", mesh, list(self.given), list(self.given.values()))


@attrs.frozen
class Roles:
    """The numbers of the tensors of a call that an operator takes as indexes, writes to, and overwrites unread."""

    indexes: Collection[int]
    written: Collection[int]
    overwritten: Collection[int]


_ONE_MESH = "Move one of them: spmd.distribute(x.full_tensor(), spec, mesh)."


def on_one_mesh(op: Any, tensors: Sequence[torch.Tensor], roles: Roles) -> Operands:
    """The tensors of a call as DTensors on one mesh; plain ones are replicated where that is allowed, and numbers.

    Raises:
        MeshError: DTensors on several meshes.
        ShardingError: a plain tensor that is not torch's own, or that is written to.
        DivergenceError: ranks have made different plain tensors.
    """
    dtensors = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    mesh = next((tensor for tensor in dtensors if tensor.ndim), dtensors[0]).mesh
    placed: list[DTensor] = []
    made: list[torch.Tensor] = []
    given: dict[str, torch.Tensor] = {}
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            placed.append(_moved(op, tensor, mesh))
            continue
        if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
            check_placeable(tensor, mesh, f"An operand of {op} at {where()}")
        if number in roles.written or not (number in roles.indexes or is_number(tensor)):
            is_made = _is_torchs(op, tensor, mesh, number in roles.written)
            if number not in roles.overwritten and not is_number(tensor):
                made += [tensor] if is_made else []
                given |= {} if is_made else {f"operand {number} of {op}": tensor}
        elif number in roles.indexes:
            given[f"operand {number} of {op}"] = tensor
        placed.append(_replicated(op, tensor, mesh))
    check_replicas(op, mesh, made)
    return Operands(placed, given)


def _moved(op: Any, tensor: DTensor, mesh: Mesh) -> DTensor:
    if tensor.mesh == mesh:
        return tensor
    if tensor.ndim:
        raise MeshError(f"{op} at {where()} has operands on {mesh} and on {tensor.mesh}. {_ONE_MESH}")
    return _replicated(op, tensor._whole(), mesh)  # a number


def _replicated(op: Any, tensor: torch.Tensor, mesh: Mesh) -> DTensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        _expect_plain_gradient(tensor)
    placed = place(tensor, DTensorSpec.replicated(mesh, TensorMeta.of(tensor)), f"an operand of {op}")
    return placed if tensor.is_contiguous() else wrap(placed._spec, placed._shards, tensor.stride())


def _is_torchs(op: Any, tensor: torch.Tensor, mesh: Mesh, is_written: bool) -> bool:
    """Test whether torch made a plain tensor; raise a ShardingError if the user did, and has not said what it is."""
    if is_written:
        if tensor.numel() == 1:
            return False
        if refusal(tensor) is not None:
            raise ShardingError(
                f"{op} at {where()} writes values of a DTensor to a plain tensor {TensorMeta.of(tensor)}. Make a new "
                "value (y = y + x), write to a DTensor (torch.empty_like(x)), or take the whole tensor first: "
                "x.full_tensor()."
            )
        return True
    if _replicates.get() or is_backward() or _is_asserted():
        return False
    advice = refusal(tensor)
    if advice is not None:
        raise ShardingError(
            f"{op} at {where()} has a plain tensor {TensorMeta.of(tensor)} beside a DTensor on {mesh}. Place it with "
            "spmd.distribute(x, spec, mesh), or let plain tensors count as replicated: with "
            f"spmd.implicit_replication(). Numbers and 0-d tensors need neither.{advice}"
        )
    return True


def write_plain(result: Any, targets: Sequence[tuple[DTensor, torch.Tensor]]) -> Any:
    """Write to plain tensors what their replicas have become; they stand for these in the result."""
    for replica, plain in targets:
        plain.copy_(replica._shards[0].reshape(plain.shape))
        remember(plain)
    plain_of = {id(replica): plain for replica, plain in targets}
    return map_leaves(lambda leaf: plain_of.get(id(leaf), leaf), result)


def _expect_plain_gradient(tensor: torch.Tensor) -> None:
    """Let the gradient of a plain tensor be one, too, where operators on DTensors compute it."""
    hooks = (tensor._backward_hooks or {}).values()
    if not any(isinstance(hook, functools.partial) and hook.func is _as_plain for hook in hooks):
        tensor.register_hook(functools.partial(_as_plain, tensor.device))


def _as_plain(device: torch.device, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor().to(device) if isinstance(gradient, DTensor) else gradient


def _is_asserted() -> bool:
    """Whether `torch.testing.assert_close` calls: it reads values, so a plain tensor may be one of the two."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.testing._comparison":
        frame = frame.f_back
    return frame is not None
