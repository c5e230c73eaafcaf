"""`shard_map`: what one rank does, as a function of global values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

import torch
from typing_extensions import ParamSpec

from spmd.api.compiled import Compiled
from spmd.api.jit import Jitted, jit
from spmd.api.programs.result_specs import result_specs
from spmd.api.values.dtensor import DTensor
from spmd.collectives.environment import bound_axes
from spmd.core.compile_lock import COMPILING, compiled_property
from spmd.core.mesh import Mesh, check_mesh, current_mesh
from spmd.core.pytree import broadcast_prefix, tree_flatten
from spmd.core.spec import FREE, DTensorSpec, P
from spmd.errors import MeshError, TraceError
from spmd.job.tracebacks import hides_internals
from spmd.lowering.program import LocalProgram
from spmd.tracing.running import AsWritten, running, running_trace
from spmd.tracing.traced import Traced

if TYPE_CHECKING:
    from spmd.inspect.plan import Plan


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class ShardMapped(Generic[_Arguments, _Result]):
    """A function under `shard_map`: it takes and returns global values, and each rank runs it on its shards."""

    def __init__(
        self,
        function: Callable[_Arguments, _Result],
        mesh: Mesh | None,
        in_specs: Any,
        out_specs: Any,
        axis_names: frozenset[str] | None,
        check: bool,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._mesh = function, None if mesh is None else check_mesh(mesh)
        self._in_specs, self._out_specs, self._axis_names, self._check = in_specs, out_specs, axis_names, check
        self._programs: dict[tuple[Any, ...], Jitted[..., Any]] = {}

    @hides_internals
    def __call__(self, *args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        """Run the function on every rank, with arguments by position.

        Raises:
            TraceError: an argument by name.
        """
        if keywords:
            raise TraceError(
                f"{self!r} takes its arguments by position, of which in_specs speaks (got {', '.join(keywords)} by "
                "name). Leave out the names."
            )
        outer = running()
        if outer is None:
            return self._program(args)(*args)  # type: ignore[no-any-return]
        return self._uncompiled(args) if isinstance(outer, AsWritten) else self._region(*args)  # type: ignore[no-any-return]

    def _uncompiled(self, args: tuple[Any, ...]) -> Any:
        """Call the function as it is written, under `spmd.disable_jit`."""
        with COMPILING:
            from spmd.api.uncompiled.inside import call_mapped, is_inside  # few need it: `import spmd` leaves it out
            from spmd.api.uncompiled.whole import call_whole

        mesh = current_mesh(self._mesh)
        if is_inside():
            return call_mapped(self._region, args, mesh)

        def out_specs(result: Any, _: Any) -> Sequence[DTensorSpec | None]:
            return result_specs(self._out_specs, result, mesh, ()).specs

        return call_whole(lambda args: self(*args), args, mesh, self._in_specs, out_specs, repr(self))  # type: ignore[call-arg]

    @hides_internals
    def trace(self, *args: object) -> Traced:
        """The function as a flat program of functional operators; the stages are those of a jitted function."""
        return self._program(args).trace(*args)

    @hides_internals
    def plan(self, *args: object) -> Plan:
        """The plan of the function as a whole program; its collectives are the function's own."""
        return self._program(args).plan(*args)

    @hides_internals
    def lower(self, *args: object) -> LocalProgram:
        """The program that each rank runs; `print(f.lower(*args).as_text())` shows it."""
        return self._program(args).lower(*args)

    @hides_internals
    def compile(self, *args: object) -> Compiled[_Result]:
        """The compiled function for such arguments; on a distributed mesh a collective call."""
        return self._program(args).compile(*args)

    def _program(self, args: tuple[Any, ...]) -> Jitted[..., Any]:
        """The jitted function that runs outside of other programs."""
        return self.jitted if self._axis_names is None else self._partly_automatic(args)

    @compiled_property
    def jitted(self) -> Jitted[..., Any]:
        """The function as a whole program."""
        return jit(self._region, self._in_specs, self._out_specs, mesh=self._mesh)  # type: ignore[no-any-return]

    def _partly_automatic(self, args: tuple[Any, ...]) -> Jitted:
        """As `jitted`, for DTensors that are sharded over automatic axes, of which the specs do not speak."""
        leaves, tree = tree_flatten(args)
        key = (current_mesh(self._mesh), tree, *(leaf.spec if isinstance(leaf, DTensor) else None for leaf in leaves))
        if key not in self._programs:
            manual = self._manual_axes(key[0])
            specs = broadcast_prefix(self._in_specs, args, what="in_specs")
            found = [_with_automatic(leaf, spec, manual) for leaf, spec in zip(leaves, specs, strict=True)]
            own = found == list(specs)
            self._programs[key] = self.jitted if own else jit(self._region, tree.unflatten(found), FREE, mesh=key[0])
        return self._programs[key]

    def _region(self, *args: Any) -> Any:
        from spmd.tracing.manual.region import Region  # with the rules, which `import spmd` leaves out

        mesh = current_mesh(self._mesh)
        function, in_specs, args = _without_numbers(self._function, self._in_specs, args)
        region = Region(
            function,
            mesh,
            self._manual_axes(mesh),
            in_specs,
            self._out_specs,
            self._check,
            running_trace().coordinate or (0,) * len(mesh.names),
        )
        return region(*args)

    def _manual_axes(self, mesh: Mesh) -> tuple[str, ...]:
        if self._axis_names is None:
            return tuple(axis for axis in mesh.names if axis not in bound_axes()) or mesh.names
        for axis in sorted(self._axis_names - set(mesh.names)):
            raise MeshError(f"axis_names has {axis!r}: {mesh} has axes {', '.join(map(repr, mesh.names))}.")
        return tuple(axis for axis in mesh.names if axis in self._axis_names)

    def __repr__(self) -> str:
        return f"spmd.shard_map({getattr(self._function, '__qualname__', self._function)})"


def _without_numbers(
    function: Callable[..., Any], in_specs: Any, args: tuple[Any, ...]
) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """A function of tensors that closes over the floats among its arguments, its specs, and its arguments."""
    leaves, tree = tree_flatten(args)
    tensors_at = [n for n, leaf in enumerate(leaves) if not isinstance(leaf, (float, torch.SymFloat))]
    if len(tensors_at) == len(leaves):
        return function, in_specs, args
    specs = broadcast_prefix(in_specs, args, what="in_specs", optional=True)

    @functools.wraps(function)
    def of_tensors(*tensors: Any) -> Any:
        given = dict(enumerate(leaves)) | dict(zip(tensors_at, tensors, strict=True))
        return function(*tree.unflatten(given.values()))

    return of_tensors, tuple(specs[n] for n in tensors_at), tuple(leaves[n] for n in tensors_at)


def _with_automatic(leaf: Any, spec: Any, manual: Sequence[str]) -> Any:
    """The spec of a DTensor, if along the manual axes it is this one; else this one."""
    if not isinstance(leaf, DTensor):
        return spec
    held = leaf.spec.pspec
    dims = (tuple(axis for axis in dim if axis in manual) for dim in held.dims)
    partial = {axis: op for axis, op in held.partial if axis in manual}
    return held if P(*dims, partial=partial) == spec else spec


class ShardMapDecorator(Protocol):
    """A decorator that makes a `ShardMapped` of a function."""

    def __call__(self, f: Callable[_Arguments, _Result], /) -> ShardMapped[_Arguments, _Result]: ...


@overload
def shard_map(
    f: Callable[_Arguments, _Result],
    mesh: Mesh | None = None,
    in_specs: object = None,
    out_specs: object = None,
    *,
    axis_names: Iterable[str] | None = None,
    check: bool = True,
) -> ShardMapped[_Arguments, _Result]: ...


@overload
def shard_map(
    f: None = None,
    mesh: Mesh | None = None,
    in_specs: object = None,
    out_specs: object = None,
    *,
    axis_names: Iterable[str] | None = None,
    check: bool = True,
) -> ShardMapDecorator: ...


def shard_map(
    f: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    axis_names: Iterable[str] | None = None,
    check: bool = True,
) -> Any:
    """Write what one rank does: a function of shards with explicit collectives, as a function of global values.

    `shard_map(f, mesh, in_specs, out_specs)` wraps; `@shard_map(mesh=..., in_specs=..., out_specs=...)` decorates. Each
    rank calls `f` with its shards of the arguments, and `f` calls `spmd.collectives` by the names of mesh axes. Inside
    `jit` this is a part of the outer program; outside it is compiled as `jit` does, once for each signature. Transforms
    of `torch.func` work on either side. Modelled on `jax.shard_map`.

    Along each axis a per-rank value has a type, which decides how gradients are summed over ranks: invariant (the same
    on all ranks), varying, unreduced (each rank holds a summand) or reduced (the same on all ranks, while its gradient
    is in summands). An operator of invariant and varying values casts the former; the transpose of the cast is the sum
    of the gradients. `docs/shard_map_types.md` explains it.

    Args:
        f: a function of pytrees of tensors, the shards of one rank, and of floats, which each rank has. Tensors that it
            closes over are the same on all ranks.
        mesh: the mesh; by default that of `use_mesh` when the function is called.
        in_specs: a pytree prefix of the tuple of arguments, of `P`s over `axis_names`. Along an axis that a spec shards
            a value is varying, along a partial one unreduced, else invariant.
        out_specs: a pytree prefix of the result. A result must be invariant along the axes that its spec leaves out,
            and unreduced along those that are partial in it.
        axis_names: the axes that are manual in `f`, by default all; in the body of another shard_map, those that are
            not manual yet. Along other axes the values in it are global, and are sharded as the planner decides. Of
            these other axes specs do not speak: outside of `jit`, DTensors may be sharded over them, too.
        check: whether a result that varies along an axis that its spec leaves out is an error. If not, the value of the
            rank at index 0 is taken, and the gradient goes there. This is all that it changes: unlike in JAX, gradients
            are the same with and without it.

    Returns:
        The function of global values; without `f`, a decorator that makes one. Type checkers see the parameters and
        the result of `f`, as with `jit`.

    Raises:
        MeshError: `axis_names` has an axis that the mesh lacks, or that is manual already.
        ShardingError: specs that do not fit the arguments, or a result that has not the type that its spec requires.
        TraceError: an operator that mixes types, or that is not linear in an unreduced value.

    >>> import torch
    >>> from spmd import P, collectives, make_mesh
    >>> mesh = make_mesh({"x": 4}, runtime="virtual")
    >>> total = shard_map(lambda x: collectives.psum(x, "x"), mesh, P("x"), P())
    >>> total(torch.arange(8.0)).full_tensor()
    tensor([12., 16.])
    """
    names = None if axis_names is None else frozenset((axis_names,) if isinstance(axis_names, str) else axis_names)
    make = functools.partial(
        ShardMapped, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check=check
    )
    return make if f is None else make(f)
