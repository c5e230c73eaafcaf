"""DTensors made sharded: each process makes the shards that it holds, and sends nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import torch

from spmd.api.values.dtensor import DTensor, wrap
from spmd.core.mesh import Mesh, current_mesh
from spmd.core.pytree import SpecLike, leaf_meta, make_spec
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.errors import ShardingError
from spmd.job.tracebacks import hides_internals
from spmd.random.generators.implementations import GENERATORS
from spmd.tracing.constrain import constrain
from spmd.tracing.counter_draws import drawn_box
from spmd.tracing.draw_scopes import IMPL, Rng, draw_scope, drawing_by, seed_key
from spmd.tracing.running import is_tracing

if TYPE_CHECKING:
    from typing_extensions import Unpack

TensorLike: TypeAlias = torch.Tensor | TensorMeta
"""A tensor, whose values are not read, or its shape and dtype."""

_REPLICATED = P()


class _Like(TypedDict, total=False):
    """What may be given beside the tensor whose shape and dtype a new one has; described by `zeros_like`."""

    spec: SpecLike | None
    mesh: Mesh | None
    dtype: torch.dtype | None
    requires_grad: bool


@hides_internals
def zeros(
    *size: int | Sequence[int],
    spec: SpecLike = _REPLICATED,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor of zeros, made sharded: as `torch.zeros`, but no rank holds more than its shard.

    Inside of `jit` it is a value of the traced function with this sharding.

    Args:
        size: the global shape, as numbers or as one sequence of them.
        spec: the spec, by default replicated. Along partial axes the rank at index 0 has the values, and others have
            the neutral element.
        mesh: the mesh; by default that of `use_mesh`.
        dtype: the dtype, by default `torch.get_default_dtype()`.
        requires_grad: whether the result is a leaf that requires gradients.

    Raises:
        ShardingError: a size that is no shape, or a spec that does not fit.
        MeshError: no mesh, or an abstract one.

    >>> import spmd
    >>> mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    >>> spmd.zeros(5, 3, spec=P("data"), mesh=mesh)
    DTensor(f32[5,3] P('data') on Mesh(data=2), shards [3,3] [2,3])
    """
    return _filled("zeros", _shape(size, "zeros"), 0, dtype or torch.get_default_dtype(), spec, mesh, requires_grad)


@hides_internals
def ones(
    *size: int | Sequence[int],
    spec: SpecLike = _REPLICATED,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor of ones, made sharded; the arguments and errors are those of `zeros`.

    >>> import spmd
    >>> spmd.ones((2, 2), spec=P("data"), mesh=spmd.make_mesh({"data": 2}, runtime="virtual")).shards
    (tensor([[1., 1.]]), tensor([[1., 1.]]))
    """
    return _filled("ones", _shape(size, "ones"), 1, dtype or torch.get_default_dtype(), spec, mesh, requires_grad)


@hides_internals
def full(
    size: int | Sequence[int],
    fill_value: complex,
    *,
    spec: SpecLike = _REPLICATED,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor of one number, made sharded; the other arguments and errors are those of `zeros`.

    Args:
        fill_value: the number; without `dtype` it determines that, as in `torch.full`.

    >>> import spmd
    >>> spmd.full((2,), True, spec=P("data"), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))
    DTensor(b8[2] P('data') on Mesh(data=2), shards 2x[1])
    """
    found = torch.full((), fill_value, dtype=dtype, device="meta").dtype
    return _filled("full", _shape((size,), "full"), fill_value, found, spec, mesh, requires_grad)


@hides_internals
def empty(
    *size: int | Sequence[int],
    spec: SpecLike = _REPLICATED,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor of unspecified values, made sharded; the arguments and errors are those of `zeros`.

    Replicas may differ until they are written to.

    >>> import spmd
    >>> spmd.empty(4, spec=P("data"), mesh=spmd.make_mesh({"data": 2}, runtime="virtual")).shape
    torch.Size([4])
    """
    return _filled("empty", _shape(size, "empty"), None, dtype or torch.get_default_dtype(), spec, mesh, requires_grad)


@hides_internals
def rand(
    *size: int | Sequence[int],
    spec: SpecLike = _REPLICATED,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    rng: Rng = "torch",
) -> DTensor:
    """A DTensor of uniform random numbers in [0, 1): those of `torch.rand` after the same `torch.manual_seed`.

    So that they do not depend on the mesh, each rank draws the whole tensor and keeps its shard: for a moment it holds
    the whole. On a distributed mesh ranks compare the states of their generators at the first call.

    Args:
        size, spec, mesh, dtype, requires_grad: as for `zeros`.
        rng: as of `jit`. With `"counter"` each rank draws its shard by keys of a seed that the generator draws: other
            numbers, equal on every mesh, and those of a function that draws nothing else under `jit(rng="counter")`.

    Raises:
        DivergenceError: ranks with generators in different states.
        ShardingError, MeshError: as `zeros`.

    >>> import spmd
    >>> mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    >>> _ = torch.manual_seed(0)
    >>> drawn = spmd.rand(5, spec=P("data"), mesh=mesh)
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(torch.rand(5), drawn.full_tensor())
    True
    """
    return _drawn("rand", _shape(size, "rand"), dtype or torch.get_default_dtype(), spec, mesh, requires_grad, rng)


@hides_internals
def randn(
    *size: int | Sequence[int],
    spec: SpecLike = _REPLICATED,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    rng: Rng = "torch",
) -> DTensor:
    """A DTensor of standard normal random numbers: those of `torch.randn` after the same `torch.manual_seed`.

    As `rand` otherwise.

    >>> import spmd
    >>> spmd.randn(4, 2, spec=P("data"), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))
    DTensor(f32[4,2] P('data') on Mesh(data=2), shards 2x[2,2])
    """
    return _drawn("randn", _shape(size, "randn"), dtype or torch.get_default_dtype(), spec, mesh, requires_grad, rng)


@hides_internals
def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    spec: SpecLike = _REPLICATED,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor of numbers from `start` (by default 0) up to `end`, which it does not reach, made sharded.

    Its values are those of `torch.arange`; with a step that is no integer, to rounding in the last digit.

    Args:
        start, end, step: as for `torch.arange`, which may be called with `end` alone.
        spec, mesh, dtype, requires_grad: as for `zeros`; without `dtype`, numbers that are integers have int64.

    Raises:
        ShardingError, MeshError: as `zeros`.

    >>> import spmd
    >>> spmd.arange(5, spec=P("data"), mesh=spmd.make_mesh({"data": 2}, runtime="virtual")).shards
    (tensor([0, 1, 2]), tensor([3, 4]))
    """
    first, last = (0, start) if end is None else (start, end)
    if is_tracing():
        return constrain(torch.arange(first, last, step, dtype=dtype, device=current_mesh(mesh).device), spec)  # type: ignore[return-value]
    meta = TensorMeta.of(torch.arange(first, last, step, dtype=dtype, device="meta"))

    def part(found: DTensorSpec, coordinate: tuple[int, ...]) -> torch.Tensor:
        (places,), device = found.local_slices(coordinate), found.mesh.device
        if not meta.dtype.is_floating_point:
            begin, by = int(first), int(step)
            return begin + by * torch.arange(places.start, places.stop, dtype=meta.dtype, device=device)
        precise = torch.float32 if device.type == "mps" else torch.float64
        numbers = torch.arange(places.start, places.stop, dtype=precise, device=device)
        return numbers.mul_(step).add_(first).to(meta.dtype)

    return _made("arange", meta, part, spec, mesh, requires_grad)


@hides_internals
def zeros_like(value: TensorLike, **given: Unpack[_Like]) -> DTensor:
    """A DTensor of zeros with the shape and dtype of another tensor, made sharded.

    Args:
        value: a DTensor, a plain tensor, a meta tensor, or a `TensorMeta`; its values are not read.
        spec: the spec; by default that of a DTensor, without pending reductions, and else replicated.
        mesh: the mesh; by default that of a DTensor, and else that of `use_mesh`.
        dtype: another dtype.
        requires_grad: whether the result is a leaf that requires gradients.

    Raises:
        ShardingError: no tensor, or a spec that does not fit.
        MeshError: no mesh, or an abstract one.

    >>> import spmd
    >>> mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    >>> spmd.zeros_like(torch.empty(4, device="meta"), spec=P("data"), mesh=mesh)
    DTensor(f32[4] P('data') on Mesh(data=2), shards 2x[2])
    """
    return _like(zeros, value, **given)


@hides_internals
def ones_like(value: TensorLike, **given: Unpack[_Like]) -> DTensor:
    """A DTensor of ones with the shape and dtype of another tensor; as `zeros_like` otherwise."""
    return _like(ones, value, **given)


@hides_internals
def empty_like(value: TensorLike, **given: Unpack[_Like]) -> DTensor:
    """A DTensor of unspecified values with the shape and dtype of another tensor; as `zeros_like` otherwise.

    The way from a parameter on the meta device to one that `reset_parameters()` can fill, shard by shard:
    `torch.nn.Parameter(spmd.empty_like(parameter, spec=..., mesh=...))`.
    """
    return _like(empty, value, **given)


@hides_internals
def full_like(value: TensorLike, fill_value: complex, **given: Unpack[_Like]) -> DTensor:
    """A DTensor of one number with the shape and dtype of another tensor; as `zeros_like` otherwise."""
    return _like(lambda size, **options: full(size, fill_value, **options), value, **given)


@hides_internals
def rand_like(value: TensorLike, *, rng: Rng = "torch", **given: Unpack[_Like]) -> DTensor:
    """Uniform random numbers, drawn as by `rand`, with the shape and dtype of another tensor; else as `zeros_like`."""
    return _like(functools.partial(rand, rng=rng), value, **given)


@hides_internals
def randn_like(value: TensorLike, *, rng: Rng = "torch", **given: Unpack[_Like]) -> DTensor:
    """Normal random numbers, drawn as by `randn`, with the shape and dtype of another tensor; else as `zeros_like`."""
    return _like(functools.partial(randn, rng=rng), value, **given)


def _shape(size: tuple[Any, ...], name: str) -> tuple[int, ...]:
    """The shape that a factory is called with: numbers, or one sequence of them.

    Raises:
        ShardingError: it is no shape.
    """
    given = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    if not size or any(isinstance(n, bool) or not hasattr(n, "__index__") or n < 0 for n in given):
        raise ShardingError(f"spmd.{name} takes a shape, as {name}(8, 4) or {name}((8, 4)) (got {size!r}).")
    return tuple(n.__index__() for n in given)


def _filled(
    name: str,
    shape: tuple[int, ...],
    fill: Any,
    dtype: torch.dtype,
    spec: SpecLike,
    mesh: Mesh | None,
    requires_grad: bool,
) -> DTensor:
    """A DTensor of one number; of unspecified values where it is None."""

    def part(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        if fill is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.full(shape, fill, dtype=dtype, device=device)

    if is_tracing():
        return constrain(part(shape, current_mesh(mesh).device), spec)  # type: ignore[return-value]
    meta = TensorMeta(shape, dtype)
    return _made(name, meta, lambda spec, at: part(spec.local_shape(at), spec.mesh.device), spec, mesh, requires_grad)


def _drawn(
    name: Literal["rand", "randn"],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    spec: SpecLike,
    mesh: Mesh | None,
    requires_grad: bool,
    rng: Rng,
) -> DTensor:
    """A DTensor of random numbers: by keys, or by torch's operator on one of this spec."""
    if rng not in ("torch", "counter"):
        raise ShardingError(f"rng of spmd.{name} must be 'torch' or 'counter' (got {rng!r:.60}).")
    draw = {"rand": torch.rand_like, "randn": torch.randn_like}[name]
    if is_tracing():
        by_key = rng == "counter" and draw_scope() is None
        with drawing_by(seed_key()) if by_key else contextlib.nullcontext():
            drawn = draw(_filled(name, shape, None, dtype, spec, mesh, requires_grad=False))
        return constrain(drawn, spec)  # type: ignore[return-value]
    if rng == "counter":
        meta, seed = TensorMeta(shape, dtype), _seed(current_mesh(mesh))
        key = GENERATORS[IMPL].seeded(seed)
        part = lambda found, at: drawn_box(name, key, shape, found.local_slices(at), dtype)  # noqa: E731
        return _made(name, meta, part, spec, mesh, requires_grad)

    def template(found: DTensorSpec, at: tuple[int, ...]) -> torch.Tensor:  # of one element: its values are not read
        return torch.empty((), dtype=dtype, device=found.mesh.device).expand(found.local_shape(at))

    made = _made(name, TensorMeta(shape, dtype), template, spec, mesh, requires_grad=False)
    with torch.no_grad():
        found: DTensor = draw(made)  # type: ignore[assignment]
        found = found.redistribute(made.spec.pspec)
    return found.requires_grad_(requires_grad)  # type: ignore[return-value]


def _seed(mesh: Mesh) -> torch.Tensor:
    """A seed that torch's generator draws, i64[]; ranks compare its states at the first call."""
    seed = _filled("rand", (), 0, torch.int64, _REPLICATED, mesh, requires_grad=False)
    return seed.random_(-(2**63), None).shards[0]  # type: ignore[attr-defined, no-any-return]


def _made(
    name: str,
    meta: TensorMeta,
    part: Callable[[DTensorSpec, tuple[int, ...]], torch.Tensor],
    spec: SpecLike,
    mesh: Mesh | None,
    requires_grad: bool,
) -> DTensor:
    """The DTensor whose shards are what `part` makes for a spec and the coordinate of a rank."""
    found = make_spec(current_mesh(mesh), spec, meta, where=f"spmd.{name}:")

    def shard(at: tuple[int, ...]) -> torch.Tensor:
        if (neutral := found.neutral_at(at)) is None:
            return part(found, at)
        return torch.full(found.local_shape(at), neutral, dtype=meta.dtype, device=found.mesh.device)

    made = wrap(found, tuple(map(shard, found.mesh.held_coordinates)))
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


def _like(
    make: Callable[..., DTensor],
    value: Any,
    *,
    spec: SpecLike | None = None,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """What a factory makes for the shape and dtype of a value, and for the spec and the mesh of a DTensor."""
    meta = leaf_meta(value, "the tensor")
    if isinstance(value, DTensor):
        spec, mesh = spec or value.spec.complete.pspec, mesh or value.mesh
    return make(meta.shape, spec=spec or _REPLICATED, mesh=mesh, dtype=dtype or meta.dtype, requires_grad=requires_grad)
