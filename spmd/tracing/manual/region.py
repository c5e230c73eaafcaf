"""A shard_map body in a trace: its arguments enter, it is called once, its results leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from spmd.collectives.axis_types import AxisType
from spmd.collectives.environment import axis_environment, backward_environment, bound_axes
from spmd.collectives.functional import cast_along
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.placement import Reduction
from spmd.core.pytree import broadcast_prefix, flatten_with_paths, make_spec, tree_flatten
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.core.spec_text import encode_spec
from spmd.errors import MeshError, ShardingError, TraceError
from spmd.ir.variants import Unevenness
from spmd.tracing.manual.axis_types import AxisTypes, remedy, types_of_spec
from spmd.tracing.manual.casts import Casts
from spmd.tracing.manual.local_shapes import LocalShapes, even_shape
from spmd.tracing.numbers import value_of
from spmd.tracing.running import running_trace
from spmd.tracing.source import where

_I, _V, _U, _R = AxisType.INVARIANT, AxisType.VARYING, AxisType.UNREDUCED, AxisType.REDUCED


@attrs.frozen(eq=False)
class _Placed:
    """The flat arguments of a body, each with its spec, and their structure."""

    leaves: list[tuple[torch.Tensor, P]]
    tree: Any


@attrs.frozen(eq=False)
class Region:
    """A manual region: a function of per-rank values, and how global values are sharded over its mesh axes.

    Args:
        body: the function that each rank runs.
        mesh: the mesh.
        axes: the mesh axes that are manual in the body, in mesh order.
        in_specs, out_specs: pytree prefixes of the arguments and of the result, with specs over `axes`.
        check: whether a result must be invariant along the axes that its spec leaves out.
        coordinate: the coordinate of the rank with whose shards the body is traced.
    """

    body: Callable[..., Any]
    mesh: Mesh
    axes: tuple[str, ...]
    in_specs: Any
    out_specs: Any
    check: bool
    coordinate: Coordinate

    @property
    def name(self) -> str:
        """The name of the body's function, for messages."""
        return str(getattr(self.body, "__qualname__", type(self.body).__name__))

    def __call__(self, *args: Any) -> Any:
        """Call the body in the trace that is running.

        Args:
            args: pytrees of tensors of the trace.

        Returns:
            The result: global values.
        """
        self._check_axes()
        placed = self._placed(args)
        gather = running_trace().gather
        local = self._local_shapes(placed) if gather is None else None
        results, tree, paths = self._call(placed)
        if gather is not None:
            local = self._gathered_shapes(gather([tuple(leaf.shape) for leaf, _ in results]))
        left = []
        for number, ((leaf, spec), path) in enumerate(zip(results, paths, strict=True)):
            name = f"Result {path}".strip() + f" of shard_map({self.name})"
            shape = local.global_shape(number, spec, name) if local else even_shape(self.mesh, spec, tuple(leaf.shape))
            left.append(self._leave(leaf, spec, shape))
        return tree.unflatten(left)

    def _call(self, placed: _Placed) -> tuple[list[tuple[torch.Tensor, P]], Any, list[str]]:
        """Call the body.

        Returns:
            Each result with the spec with which it leaves, the structure of the result, and the paths in it.
        """
        types = _types_of_trace()
        self._allow_in_backward(types)
        entered = placed.tree.unflatten([self._enter(leaf, spec) for leaf, spec in placed.leaves])
        casts = Casts(types, (*bound_axes(), *self.axes), self._enter_whole)
        with axis_environment({axis: self.mesh.axis_size(axis) for axis in self.axes}, _reader(types)), casts:
            results = self.body(*entered)
            leaves, tree = tree_flatten(results)
            self._check_results(results)
            specs = broadcast_prefix(self.out_specs, results, what="out_specs", of="the result")
            paths = flatten_with_paths(results)[0]
            leaves = [
                self._prepared(
                    casts._entered(leaf), self._pspec(spec, leaf, f"out_specs of result{path and ' ' + path}"), path
                )
                for leaf, spec, path in zip(leaves, specs, paths, strict=True)
            ]
        return leaves, tree, paths

    def _allow_in_backward(self, types: AxisTypes) -> None:
        """Let backward passes name the axes of all regions: functions of the body run in them, when it has ended."""
        types.axes_of_regions.update((axis, self.mesh.axis_size(axis)) for axis in self.axes)
        running_trace().in_backward = lambda: backward_environment(types.axes_of_regions, _reader(types))

    def _check_axes(self) -> None:
        for axis in self.axes:
            if axis in bound_axes():
                raise MeshError(
                    f"Mesh axis {axis!r} is manual already where shard_map({self.name}) is called, at {where()}: a "
                    "value is what one rank holds along it. Name other axes in axis_names."
                )

    def _placed(self, args: tuple[Any, ...]) -> _Placed:
        """The flat arguments, each with its spec."""
        leaves, tree = tree_flatten(args)
        specs = broadcast_prefix(self.in_specs, args, what="in_specs", of="the arguments")
        paths = flatten_with_paths(args)[0]
        for leaf, path in zip(leaves, paths, strict=True):
            if not isinstance(leaf, torch.Tensor):
                raise TraceError(
                    f"Argument {path} of shard_map({self.name}) must be a tensor (got {_text(leaf)}). "
                    "Close over what is no tensor."
                )
        return _Placed(
            [
                (leaf, self._pspec(spec, leaf, f"in_specs of argument {path}"))
                for leaf, spec, path in zip(leaves, specs, paths, strict=True)
            ],
            tree,
        )

    def _pspec(self, spec: Any, leaf: torch.Tensor, what: str) -> P:
        """A spec that fits a tensor and names axes of the region only."""
        meta = TensorMeta.of(leaf)
        found = make_spec(self.mesh, spec, meta, where=f"shard_map({self.name}), {what},").pspec
        for axis in (*(axis for dim in found.dims for axis in dim), *dict(found.partial)):
            if axis not in self.axes:
                raise ShardingError(
                    f"shard_map({self.name}), {what}: {found!r} names {axis!r}, which is not manual here: axis_names "
                    f"are {', '.join(map(repr, self.axes))}. Leave it out, or add it to axis_names."
                )
        if any(op != "sum" for _, op in found.partial):
            raise ShardingError(f"shard_map({self.name}), {what}: {found!r} must be partial by sum only.")
        return found

    def _sizes(self) -> list[int]:
        return [self.mesh.axis_size(axis) for axis in self.axes]

    def _enter(self, leaf: torch.Tensor, spec: P) -> torch.Tensor:
        shape = DTensorSpec.make(self.mesh, spec, TensorMeta.of(leaf)).local_shape(self.coordinate)
        op = torch.ops.spmd.enter
        return op(leaf, encode_spec(spec), [], list(self.axes), self._sizes(), list(shape))  # type: ignore[no-any-return]

    def _enter_whole(self, leaf: torch.Tensor) -> torch.Tensor:
        """The per-rank value of a tensor that the body closes over: all ranks hold all of it."""
        return self._enter(leaf, P())

    def _check_results(self, results: Any) -> None:
        for path, leaf in zip(*flatten_with_paths(results)[:2], strict=True):
            if not isinstance(leaf, torch.Tensor):
                raise TraceError(
                    f"Result {path} of shard_map({self.name}) must be a tensor (got {_text(leaf)}). "
                    "Return tensors only, or None for nothing."
                )

    def _prepared(self, leaf: torch.Tensor, spec: P, path: str) -> tuple[torch.Tensor, P]:
        """A result of the type that its spec requires, and the spec with which it leaves.

        Raises:
            ShardingError: a result that is not invariant along an axis that its spec leaves out.
        """
        trace, types = running_trace(), _types_of_trace()
        value = trace.value(leaf)
        first: list[str] = []
        for axis, wanted in types_of_spec(spec, self.axes).items():
            held = types.of(value).get(axis, _I)
            if held is wanted:
                continue
            if wanted is _I and held in (_V, _U) and self.mesh.axis_size(axis) == 1:
                leaf = _of_one_rank(leaf, axis, held)
            elif wanted is _V and held in (_I, _R):
                leaf = cast_along(leaf, axis, _V)
            elif wanted is _I and held is _V and not self.check:
                first.append(axis)
            else:
                raise ShardingError(
                    f"shard_map({self.name}), out_specs of result{f' {path}' if path else ''} "
                    f"{value.meta}: {spec!r} says that it is {wanted} along {axis!r}, and it is {held} since "
                    f"{types.origin(value, axis)}. {remedy(held, wanted, axis)}" + _other_spec(held, wanted, axis)
                )
        return (_of_first(leaf, first), _with_partial(spec, first, _op(leaf))) if first else (leaf, spec)

    def _local_shapes(self, placed: _Placed) -> LocalShapes | None:
        """The shapes of all results on all ranks, where shards of arguments differ between ranks; else None.

        The body is called once for each set of local shapes; what these calls record is dropped.
        """
        specs = [DTensorSpec.make(self.mesh, spec, TensorMeta.of(leaf)) for leaf, spec in placed.leaves]
        unevenness = self._unevenness(specs)
        if unevenness is None:
            return None
        operations, shapes = running_trace().recorder.operations, {}
        for coordinate in unevenness.coordinates():
            start = len(operations)
            results, _, _ = attrs.evolve(self, coordinate=self._at(coordinate))._call(placed)
            shapes[unevenness.key(coordinate)] = [tuple(leaf.shape) for leaf, _ in results]
            del operations[start:]
        return LocalShapes(unevenness, shapes)

    def _gathered_shapes(self, gathered: Sequence[Sequence[tuple[int, ...]]]) -> LocalShapes:
        """The shapes of all results on the ranks of this region, from those of all ranks of the mesh."""
        each = Unevenness(self.mesh, (), self.axes)
        ranks = {each.key(place): self.mesh.rank(self._at(place)) for place in each.coordinates()}
        return LocalShapes(each, {key: gathered[rank] for key, rank in ranks.items()})

    def _at(self, coordinate: Coordinate) -> Coordinate:
        """This rank's coordinate, but for the axes of the region: those of another coordinate."""
        pairs = zip(self.mesh.names, self.coordinate, coordinate, strict=True)
        return tuple(other if axis in self.axes else own for axis, own, other in pairs)

    def _unevenness(self, specs: Sequence[DTensorSpec]) -> Unevenness | None:
        """How shapes of shards differ between ranks; also notes it for the whole trace."""
        trace = running_trace()
        uneven = tuple(dict.fromkeys(spec for spec in specs if not spec.is_even))
        before = trace.unevenness
        if before is not None and bound_axes():  # inside of a region whose own shapes may differ
            axes = tuple(dict.fromkeys((*before.axes, *(a for spec in specs for dim in spec.dims for a in dim))))
            trace.unevenness = attrs.evolve(before, axes=axes)
        elif uneven:
            known = before.specs if before is not None else ()
            axes = before.axes if before is not None else ()
            trace.unevenness = Unevenness(self.mesh, tuple(dict.fromkeys((*known, *uneven))), axes)
        return Unevenness(self.mesh, uneven) if uneven else None

    def _leave(self, leaf: torch.Tensor, spec: P, shape: tuple[int, ...]) -> torch.Tensor:
        op = torch.ops.spmd.leave
        return op(leaf, encode_spec(spec), [], list(self.axes), self._sizes(), list(shape))  # type: ignore[no-any-return]


def _text(leaf: Any) -> str:
    """What is no tensor, in messages."""
    value = value_of(leaf)
    return f"{type(value).__name__} {value!r:.60}"


def _op(leaf: torch.Tensor) -> Reduction:
    """The reduction that returns the value of the one rank that holds it, where others hold its neutral element."""
    return "max" if leaf.dtype == torch.bool else "sum"


def _other_spec(held: AxisType, wanted: AxisType, axis: str) -> str:
    """The out_specs that a result fits which is not invariant, as a sentence."""
    if wanted is not _I or held is _R:
        return ""
    if held is _U:
        return f" Or make it partial over {axis!r} in out_specs."
    return f" Or name {axis!r} in out_specs: its ranks hold different shards."


def _of_one_rank(leaf: torch.Tensor, axis: str, held: AxisType) -> torch.Tensor:
    """The invariant value of one that the only rank along an axis holds: its sum, for which nothing is sent."""
    op = torch.ops.spmd.all_reduce_unreduced if held is _U else torch.ops.spmd.all_reduce
    return op(leaf, _op(leaf), [axis])  # type: ignore[no-any-return]


def _of_first(leaf: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """The value of the rank at index 0 along axes, as summands: of all others, zero."""
    return torch.ops.spmd.to_partial(leaf, _op(leaf), list(axes))  # type: ignore[no-any-return]


def _with_partial(spec: P, axes: Sequence[str], op: Reduction) -> P:
    return P(*spec.dims, partial={**dict(spec.partial), **dict.fromkeys(axes, op)})


def _types_of_trace() -> AxisTypes:
    """The types of the values of the trace that is running, which are derived from its first region on."""
    recorder = running_trace().recorder
    if not isinstance(recorder.observer, AxisTypes):
        recorder.observer = AxisTypes()
    return recorder.observer


def _reader(types: AxisTypes) -> Callable[[torch.Tensor], Any]:
    """Returns the types of a tensor of the trace."""
    return lambda x: types.of(running_trace().value(running_trace().take(x)))
