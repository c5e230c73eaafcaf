"""`DTensor`, the argument and result type of jitted functions: a global tensor, held as the shards of this process."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeVar

import torch
from torch._prims_common import make_contiguous_strides_for
from torch.utils._mode_utils import no_dispatch

from spmd.api.values.communication import is_watched, record_move
from spmd.api.values.gradient_specs import gradient_of_parts, gradient_spec
from spmd.api.values.joint_shards import check_shards, joint_specs
from spmd.api.values.linear import linear
from spmd.api.values.moves import move_shards, start_move, target_of, why_outside
from spmd.api.values.numpy_operators import run_ufunc
from spmd.api.values.on_class import OnClass
from spmd.api.values.optimizer_states import place_loaded_state
from spmd.api.values.saved_states import saved_storage
from spmd.api.values.wrapper import (
    SHARD,
    Shards,
    Wrapper,
    delete_shards,
    lose_shards,
    replace_shards,
    set_attribute,
    set_maker,
    set_spec,
)
from spmd.core.mesh import Mesh, Runtime, current_mesh
from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.core.pytree import SpecLike
from spmd.core.shards import join
from spmd.core.spec import Dims, DTensorSpec, P, Reductions, TensorMeta
from spmd.errors import ShardingError
from spmd.job import checks
from spmd.job.torch_compile import never_compiled
from spmd.job.tracebacks import hides_internals
from spmd.runtime.redistribute import coordinates_here
from spmd.tracing.source import where as place_text

_REPLICATED = P()

Operators = TypeVar("Operators", bound=Callable[..., Any])


class DTensor(Wrapper):
    """A global tensor on a mesh: a spec, and the shards that this process holds.

    Shape, dtype and device are those of the global tensor. `distribute` and `DTensor.from_local` make one, functions
    under `spmd.jit` and torch's operators (`spmd.api.eager`) compute on it; `full_tensor()`, `numpy()`, `item()` and
    such assemble its values, and `shards` has its parts. Its spec never changes.

    The idea is JAX's global `jax.Array`; the name is torch's.

    >>> from spmd import P, distribute, make_mesh
    >>> mesh = make_mesh({"data": 2}, runtime="virtual")
    >>> x = distribute(torch.arange(3), P("data"), mesh)
    >>> x
    DTensor(i64[3] P('data') on Mesh(data=2), shards [2] [1])
    >>> x.shards, x.full_tensor()
    ((tensor([0, 1]), tensor([2])), tensor([0, 1, 2]))
    """

    __slots__ = ()
    _family: Any = None  # aliases and views (spmd.api.eager.families); None if there are none
    _strides: tuple[int, ...] | None = None  # of the global tensor on one device; None if it is contiguous
    _places_gradient: bool = False  # whether gradients of this leaf are redistributed to its spec

    def __new__(cls, *args: object, **kwargs: object) -> DTensor:
        """Raise a TypeError: a constructor would not validate the shards."""
        raise TypeError("DTensors are made by spmd.distribute(tensor, spec, mesh) or DTensor.from_local(...).")

    @property
    def spec(self) -> DTensorSpec:
        """How the tensor is sharded on its mesh."""
        return self._spec

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis, in mesh order."""
        return self._spec.placements

    @property
    def shards(self) -> tuple[torch.Tensor, ...]:
        """The shards that this process holds, in rank order: of all ranks on a virtual mesh, else of its own rank.

        They are not copies, and must not be written to. No gradient flows through them.
        """
        return self._shards

    @hides_internals
    def to_local(self, *, grad_placements: SpecLike | None = None) -> torch.Tensor:
        """The shard of a process that holds one rank, as every process of a distributed mesh does; not a copy.

        Gradients flow through: those that ranks compute of their shards are the shards of the gradient of this tensor.

        Args:
            grad_placements: the spec of that gradient. By default that of this tensor, but replicated where it is
                partial: what replicas, and the parts of a sum, are used for must be the same on all ranks, and so are
                their gradients. If each rank uses them for a part of the result, pass a spec that is partial there.

        Raises:
            ShardingError: this process holds the shards of several ranks; or `grad_placements` does not shard the dims
                as this tensor is; or, in a backward pass without them, a pending reduction that is no sum.
        """
        if len(self._shards) != 1:
            raise ShardingError(
                f"to_local() needs a process that holds one rank (got {len(self._shards)} ranks on {self.mesh}). "
                "Use .shards[rank]."
            )
        gradient = gradient_spec(self._spec, grad_placements)
        if not self.requires_grad:
            return self._shards[0]
        return local_parts(self, gradient)[0]

    @hides_internals
    def full_tensor(self, *, grad_placements: SpecLike | None = None) -> torch.Tensor:
        """The global tensor, gathered from its shards and reduced where it is partial; a new plain tensor.

        On a distributed mesh this is a collective call, and all ranks get the tensor. Gradients flow through.

        Args:
            grad_placements: the spec of what ranks compute as the gradient of the result. By default it is replicated:
                all ranks must compute the same from it. If each rank computes a part of a sum, pass a spec that is
                partial over these axes; the parts are added.

        Raises:
            ShardingError: `grad_placements` shards a dim.
            DivergenceError: ranks make different calls.
            SpmdError: a rank failed, or never makes the call.
        """
        return assemble(self, grad_placements=grad_placements)

    def _whole(self, agreed: bool = False) -> torch.Tensor:
        """`full_tensor`, without a gradient; ranks do not compare their calls if they have `agreed` on them."""
        spec = self._spec
        if self.mesh.runtime is Runtime.VIRTUAL:
            if is_watched():
                record_move("full_tensor()", spec, DTensorSpec.replicated(self.mesh, spec.meta))
            return join(self._shards, spec)
        (whole,) = self._move("full_tensor()", DTensorSpec.replicated(self.mesh, spec.meta), agreed)
        return whole.clone() if whole is self._shards[0] else whole

    @hides_internals
    def redistribute(
        self, spec: SpecLike | DTensorSpec, *, mesh: Mesh | None = None, async_op: bool = False
    ) -> DTensor:
        """The same global tensor under another spec: a `P`, one placement for each mesh axis, or a DTensorSpec.

        On a distributed mesh this is a collective call. Gradients flow through, and have the spec of this tensor.

        Args:
            spec: the spec.
            mesh: another mesh to bring the tensor to: other axes over the same ranks, or other ranks. All ranks of both
                meshes make the call; where the new mesh is not, the result has no values, and only this call takes it.
            async_op: return while the last collective is under way, and wait for it at the first use of the result's
                values; so does the gradient. On a virtual mesh it makes no difference. A result that is never used
                keeps its memory.

        Raises:
            ShardingError: the spec does not fit the mesh or the tensor.
            MeshError: the other mesh has another runtime or kind of device.
            DivergenceError: ranks make different calls.
            SpmdError: a rank failed, or never makes the call.

        >>> from spmd import P, distribute, make_mesh
        >>> x = distribute(torch.arange(3), P("data"), make_mesh({"data": 2}, runtime="virtual"))
        >>> x.redistribute(P()).shards
        (tensor([0, 1, 2]), tensor([0, 1, 2]))
        """
        target = target_of(self._spec, spec, mesh)
        if target == self._spec:
            return self
        source, where = self._spec, "" if target.mesh == self.mesh else f", mesh={target.mesh}"
        call = f"redistribute({target.pspec!r}{where})"

        def move(value: DTensor) -> DTensor:
            if not async_op or value.mesh.runtime is not Runtime.DISTRIBUTED:
                return _moved(target, value._move(call, target), value._strides)
            finish = start_move(call, lambda: value._shards, source, target, place_text())
            if not coordinates_here(target.mesh):
                return _moved(target, finish(), value._strides)
            return _wrap_in_flight(target, finish, value._strides)

        return linear(  # type: ignore[no-any-return]
            move, lambda cotangent: cotangent.redistribute(source.complete, async_op=async_op), self
        )

    def _move(self, call: str, target: DTensorSpec, agreed: bool = False) -> Shards:
        """The shards under another spec; if ranks communicate, they first check that all of them make this call."""
        return move_shards(call, lambda: self._shards, self._spec, target, agreed)

    @staticmethod
    @hides_internals
    def from_local(
        shards: torch.Tensor | Sequence[torch.Tensor],
        mesh: Mesh | None = None,
        spec: SpecLike = _REPLICATED,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        grad_placements: SpecLike | None = None,
    ) -> DTensor:
        """A DTensor from the shards of this process, which are not copied.

        On a distributed mesh this is a collective call, each rank with its own shard; ranks compare shapes, dtypes and
        whether shards require gradients.
        Gradients flow through: a shard gets its part of the gradient, replicas and the parts of a sum all of it.

        Args:
            shards: the shards of this process's ranks in rank order; a process with one rank may pass the tensor.
            mesh: the mesh; by default that of `use_mesh`.
            spec: the spec of the global tensor; by default it is replicated. Replicas must be equal.
            run_check: whether to compare the values of replicas, by digests (for tensors above 16 MiB, of samples); so
                does `init(check="calls")`.
            shape: the global shape; by default each sharded dim has the sum of the lengths of its shards.
            grad_placements: the spec of which shards get their part of the gradient; by default `spec`, but replicated
                where that is partial.

        Raises:
            ShardingError: a wrong number of shards, or a shard whose shape, dtype or device does not match the spec;
                the message names the rank. Or `grad_placements` does not shard the dims as `spec` does.
            DivergenceError: ranks make different calls, or hold replicas that differ.

        >>> from spmd import P, make_mesh
        >>> mesh = make_mesh({"data": 2}, runtime="virtual")
        >>> DTensor.from_local([torch.zeros(2, 3), torch.zeros(1, 3)], mesh, P("data")).shape
        torch.Size([3, 3])
        """
        mesh = current_mesh(mesh)
        held = (shards,) if isinstance(shards, torch.Tensor) else tuple(shards)
        said = [repr(spec), *([] if shape is None else [f"shape={tuple(shape)}"])]
        said += [] if grad_placements is None else [f"grad_placements={grad_placements!r}"]
        requires = torch.is_grad_enabled() and any(getattr(shard, "requires_grad", False) for shard in held)
        call = f"DTensor.from_local(..., {', '.join(said)}) on {mesh}{' with a gradient' if requires else ''}"
        names = ["the tensor"] if run_check or checks.every_call else None
        (found,) = joint_specs(call, [held], [spec], mesh, shape, names=names)
        return of_parts(found, *held, gradient=gradient_spec(found, grad_placements))

    def __setattr__(self, name: str, value: object) -> None:
        if name == "data" and isinstance(value, DTensor) and (value is self or not hasattr(value._family, "base")):
            _set_data(self, value)  # as modules do: .to(dtype), .to_empty(device=...)
            return
        if name == "requires_grad" and isinstance(value, bool):
            self.requires_grad_(value)
            return
        if name in _FIXED:
            raise AttributeError(f"The {name} of a DTensor cannot be set. {_FIXED[name]}")
        set_maker(self, None)
        super().__setattr__(name, value)

    def new(self, *size: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
        """An uninitialised tensor of a shape, as `new_empty`; of data, torch's own, a plain tensor."""
        lengths = size[0] if len(size) == 1 and isinstance(size[0], torch.Size) else size or (0,)
        if options or not all(isinstance(length, int) for length in lengths):
            return super().new(*size, **options)  # type: ignore[no-any-return]
        return self.new_empty(lengths)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """Set whether autograd records what is computed from this tensor, whose gradient then has its spec.

        As torch's, but the gradient of a leaf is redistributed to the spec of the leaf, without a pending reduction,
        before it is accumulated.
        """
        super().requires_grad_(requires_grad)
        if requires_grad and self.is_leaf and not self._places_gradient:
            self.register_hook(functools.partial(_as_leaf, weakref.ref(self)))
            set_attribute(self, "_places_gradient", True)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if self.grad_fn is not None:
            raise RuntimeError(
                "A DTensor that was computed by autograd cannot be copied deeply. Use .detach() or .clone()."
            )
        shards = tuple(shard.clone() for shard in self._shards)
        copied = _leaf(
            wrap(self._spec, shards, self._strides), self.requires_grad, isinstance(self, torch.nn.Parameter)
        )
        memo[id(self)] = copied
        copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        mesh, meta = self.mesh, self._spec.meta
        where = (mesh.names, mesh.sizes, mesh.runtime.value, str(mesh.device), mesh.ranks)
        spec = (self._spec.dims, self._spec.partial, tuple(meta.shape), meta.dtype)
        is_parameter = isinstance(self, torch.nn.Parameter)
        return restore, (where, spec, self._shards, self.requires_grad, is_parameter)

    # The protocol by which torch takes a wrapper apart, and `torch.utils._python_dispatch.transform_subclass`.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[DTensorSpec, tuple[int, ...] | None, bool]]:
        """The names of the shards, as attributes, and what `DTensor.__tensor_unflatten__` needs beside them."""
        names = [f"{SHARD}{number}" for number in range(len(self._shards))]
        return names, (self._spec, self._strides, self.requires_grad)

    @OnClass
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: Any, size: Sequence[int] | None = None, stride: object = None
    ) -> DTensor:
        """The DTensor of shards by name; its dtype and device are those of its spec's."""
        spec, strides, requires_grad = context
        shards = tuple(inner[f"{SHARD}{number}"] for number in range(len(inner)))
        meta = TensorMeta(spec.meta.shape if size is None else size, shards[0].dtype)
        made = wrap(DTensorSpec(spec.mesh, spec.dims, spec.partial, meta), shards, strides)
        return _leaf(made, requires_grad, is_parameter=False)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """As of a tensor.

        Raises:
            ShardingError: it does not require grad.
        """
        if not self.requires_grad:
            raise ShardingError(
                f"backward() was called on {self!r:.200}, which does not require grad. Call requires_grad_() on what "
                "the gradient is of. A jitted function has gradients of its arguments only: pass a module as one, "
                "spmd.jit(lambda model, x: model(x)), or make it the function, spmd.jit(model)."
            )
        super().backward(*args, **kwargs)

    def tolist(self) -> Any:
        """The values as nested lists; assembled, as by `full_tensor`."""
        return self._whole().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a numpy array; assembled, as by `full_tensor`.

        Raises:
            RuntimeError: it requires a gradient, and not `force`; as torch's.
        """
        if self.requires_grad and not force:
            raise RuntimeError("A DTensor that requires grad has no numpy(). Use .detach().numpy().")
        return self._whole().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        call, mesh = f"{ufunc.__name__} of an array on {self.mesh}", self.mesh
        replicate = lambda array: _replicas(call, {"the array": array}, mesh, checks.every_call)[0]  # noqa: E731
        return run_ufunc(replicate, ufunc, method, inputs, options)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Raise a ShardingError, but for transformers' `save_pretrained`, which saves global tensors."""
        return saved_storage(self, DTensor._whole) or self._refuse(method="untyped_storage", remedy=self._READ)

    def is_floating_point(self) -> bool:
        """Test for a floating dtype; an optimizer that loads a state places it afterwards."""
        place_loaded_state(_replicas)
        return self._spec.meta.dtype.is_floating_point


def local_parts(value: DTensor, gradient: DTensorSpec | None) -> Shards:
    """The shards of this process's ranks, through which gradients flow.

    Args:
        value: the DTensor.
        gradient: the spec of what ranks compute as their gradients; None if they must not.
    """
    spec = value._spec

    def transpose(*cotangents: torch.Tensor) -> DTensor:
        found = gradient_of_parts(spec, gradient)
        if checks.every_call:
            call = f"the gradient of to_local() of {spec} on {spec.mesh}"
            joint_specs(call, [cotangents], [found.pspec], spec.mesh, spec.meta.shape, names=["the gradient"])
        return of_parts(found, *cotangents, gradient=spec)

    return linear(lambda value: tuple(shard.detach() for shard in value._shards), transpose, value)  # type: ignore[no-any-return]


def assemble(value: DTensor, agreed: bool = False, grad_placements: SpecLike | None = None) -> torch.Tensor:
    """`value.full_tensor()`; `agreed` says that all ranks have compared what they are about to assemble."""
    spec, whole = value._spec, functools.partial(DTensor._whole, agreed=agreed)
    gradient = gradient_spec(DTensorSpec.replicated(spec.mesh, spec.meta), grad_placements)
    return linear(whole, lambda cotangent: _of_whole(spec.complete, cotangent, gradient), value)  # type: ignore[no-any-return]


def _of_whole(spec: DTensorSpec, whole: torch.Tensor, held: DTensorSpec | None = None) -> DTensor:
    """The DTensor of a plain tensor of each rank: of replicas, or what `held` says of them."""
    found, mesh = held or DTensorSpec.replicated(spec.mesh, spec.meta), spec.mesh
    count = len(mesh.held_coordinates)
    times = mesh.axis_size([axis for axis, _ in found.partial]) if count > 1 else 1  # one tensor here, added so often

    def transpose(cotangent: DTensor) -> torch.Tensor:
        return cotangent.full_tensor() if times == 1 else cotangent.full_tensor() * times

    return linear(  # type: ignore[no-any-return]
        lambda whole: wrap(found, (whole.detach(),) * count).redistribute(spec.pspec), transpose, whole
    )


def _replicas(call: str, wholes: Mapping[str, torch.Tensor], mesh: Mesh, compares: bool = True) -> list[DTensor]:
    """The DTensors of plain tensors that each rank has, by name, which ranks compare in a call."""
    count = len(mesh.held_coordinates)
    held = [(whole.to(mesh.device, copy=True),) * count for whole in wholes.values()]
    if compares and count < mesh.size:
        joint_specs(call, held, [_REPLICATED] * len(held), mesh, names=list(wholes))
    return [wrap(DTensorSpec.replicated(mesh, TensorMeta.of(shards[0])), shards) for shards in held]


def of_parts(spec: DTensorSpec, *shards: torch.Tensor, gradient: DTensorSpec | None) -> DTensor:
    """The DTensor of shards that fit a spec; `gradient` is the spec of which they get their parts of a gradient."""
    return linear(  # type: ignore[no-any-return]
        lambda *shards: wrap(spec, tuple(shard.detach() for shard in shards)),
        lambda cotangent: local_parts(cotangent.redistribute(gradient_of_parts(spec, gradient).pspec), spec),
        *shards,
    )


_FIXED = {
    **dict.fromkeys(("spec", "placements", "mesh"), "Use .redistribute(spec)."),
    **dict.fromkeys(("shards",), "Use DTensor.from_local(shards, mesh, spec)."),
    **dict.fromkeys(("_spec", "_shards"), "It is private."),
    "data": "Write in place, x.copy_(y), under torch.no_grad().",
}
"""Attributes that cannot be set, and what to do instead."""


def dispatch_operators_to(function: Operators) -> Operators:
    """Let a function run all operators on DTensors: it becomes `DTensor.__torch_dispatch__`."""
    DTensor.__torch_dispatch__ = classmethod(never_compiled(function))  # type: ignore[assignment]
    return function


_contiguous_strides = functools.lru_cache(maxsize=4096)(make_contiguous_strides_for)
_make_wrapper = torch.Tensor._make_wrapper_subclass
_STRIDED = torch.strided


def _moved(spec: DTensorSpec, shards: Shards, strides: tuple[int, ...] | None) -> DTensor:
    """The DTensor of what `_move` returns; it has no shards where its mesh is not over this process."""
    value = wrap(spec, shards, strides)
    if not shards:
        lose_shards([value], why_outside(spec.mesh))
    return value


def become(value: DTensor, other: DTensor) -> None:
    """Give a DTensor the spec and the shards of another, whose shape and strides it has already."""
    set_spec(value, other._spec)
    set_attribute(value, "_strides", other._strides)
    replace_shards(value, other._shards)


def set_family(value: DTensor, family: object) -> None:
    """Make a DTensor a member of a family."""
    set_attribute(value, "_family", family)


def wrap(
    spec: DTensorSpec,
    shards: tuple[torch.Tensor, ...],
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
) -> DTensor:
    """A DTensor of shards that are known to fit the spec; the fast constructor, which validates nothing.

    Args:
        spec: its spec.
        shards: the shards that this process holds, which may have any strides.
        strides: those of the global tensor on one device, by which random operators draw; None if it is contiguous.
        offset: its offset there in the memory of the tensor that it is a view of.
    """
    meta, device = spec.meta, spec.mesh.device
    if device.type != "cpu":  # autograd needs its number, which a mesh may leave out
        device = shards[0].device if shards else torch.empty(0, device=device).device
    # Arguments by position (strides, offset and memory format first), because torch parses them a fifth faster.
    if strides is None and not offset:
        value = _make_wrapper(DTensor, meta.shape, None, None, None, meta.dtype, _STRIDED, device)
    else:
        shown = strides or _contiguous_strides(meta.shape)
        value = _make_wrapper(DTensor, meta.shape, shown, offset or None, None, meta.dtype, _STRIDED, device)
        value.__dict__["_strides"] = strides
    set_spec(value, spec)
    replace_shards(value, shards)
    return value


def _wrap_in_flight(spec: DTensorSpec, finish: Callable[[], Shards], strides: tuple[int, ...] | None) -> DTensor:
    """A DTensor whose shards are what `finish` returns, which is called when they are first read."""
    value = wrap(spec, (), strides)
    delete_shards(value)
    value.__dict__["_in_flight"] = finish
    return value


def _set_data(value: DTensor, other: DTensor) -> None:
    """Let a DTensor be another of the same shape on its mesh, which may have another dtype, and is no view."""
    if value is other:
        return
    if other._spec.mesh != value._spec.mesh or other.shape != value.shape:
        raise ShardingError(
            f"The data of a DTensor {value._spec} on {value.mesh} can be that of one of its shape on its mesh (got "
            f"{other._spec} on {other.mesh})."
        )
    share_data(value, other)


def share_data(value: DTensor, other: DTensor) -> None:
    """Let a DTensor be another, which is no view, from now on."""
    with no_dispatch():  # changes the wrapper, which has no data
        torch.Tensor.data.__set__(value, other)  # type: ignore[attr-defined]
    become(value, other)
    set_family(value, other._family)
    if other._family is not None:
        other._family.aliases.add(value)


def restore(
    where: tuple[Any, ...],
    spec: tuple[Dims, Reductions, tuple[int, ...], torch.dtype],
    shards: tuple[torch.Tensor, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> DTensor:
    """The DTensor of a pickle, from plain parts, so that `torch.load(..., weights_only=True)` accepts it.

    Raises:
        MeshError, ShardingError: parts that do not fit together or not this process.
    """
    names, sizes, runtime, device, *ranks = where  # without ranks: a pickle of an earlier version
    dims, partial, shape, dtype = spec
    mesh = Mesh(names, sizes, Runtime(runtime), torch.device(device), *ranks)
    made = DTensorSpec(mesh, dims, partial, TensorMeta(shape, dtype))
    if len(shards) != len(mesh.held_coordinates):
        raise ShardingError(
            f"A saved DTensor {made} on {mesh} has {len(shards)} shards, and this process holds "
            f"{len(mesh.held_coordinates)}. Load it with as many processes as saved it, or use spmd.checkpoint."
        )
    check_shards(made, shards)
    return _leaf(wrap(made, shards), requires_grad, is_parameter)


def _as_leaf(leaf: weakref.ref[DTensor], gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of a leaf with its spec; by a weak reference, because the leaf has this as a hook."""
    found = leaf()
    if found is None or gradient is None:
        return gradient
    if not isinstance(gradient, DTensor):  # of what a DTensor was written to, a plain number for example
        (gradient,) = _replicas("the gradient", {"the gradient": gradient}, found.mesh, compares=False)
    if gradient._spec == found._spec:  # which may be a view of what the backward pass computed, and is then no more
        return gradient if gradient._family is None else wrap(gradient._spec, gradient._shards, gradient._strides)
    return gradient.redistribute(found._spec.complete.pspec)


def _leaf(value: DTensor, requires_grad: bool, is_parameter: bool) -> DTensor:
    return torch.nn.Parameter(value, requires_grad) if is_parameter else value.requires_grad_(requires_grad)  # type: ignore[return-value]


torch.serialization.add_safe_globals(
    [restore, DTensorSpec, TensorMeta, P, Mesh, Runtime, Shard, Replicate, Partial]  # for specs in checkpoints
)
