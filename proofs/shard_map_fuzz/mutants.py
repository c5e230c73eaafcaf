"""Mutants of shard_map: each transpose, type and cast, and uneven shards, broken in turn, which the fuzz must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from proofs.fuzz.mutants.mutant import Change, Mutant, Patch, mutant, replaced
from spmd.collectives import manual, primitives
from spmd.collectives.axis_types import AxisType
from spmd.collectives.primitive import Primitive
from spmd.ir.variants import Variants
from spmd.tracing.manual.axis_types import AxisTypes
from spmd.tracing.manual.casts import Casts
from spmd.tracing.manual.local_shapes import LocalShapes, even_shape

_I, _V, _U, _R = AxisType.INVARIANT, AxisType.VARYING, AxisType.UNREDUCED, AxisType.REDUCED
_ops = torch.ops.spmd
_CASTS, _FUNCTIONAL = "spmd.tracing.manual.casts", "spmd.collectives.functional"
_ALL_REDUCE = "spmd.collectives.primitives.all_reduce"
_REGION = "spmd.tracing.manual.region"


def _doubled(transpose: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: 2 * transpose(*args)


def _transpose(primitive: Primitive, name: str, breaks: str, change: Change) -> Mutant:
    return mutant(f"transpose of {name}", breaks, Patch(primitive, "transpose", change))


def _types(primitive: Primitive, name: str, result: AxisType) -> Mutant:
    def change(types: Callable[..., Mapping[AxisType, AxisType]]) -> Callable[..., Mapping[AxisType, AxisType]]:
        return lambda *args: dict.fromkeys(types(*args), result)

    return mutant(f"type of {name}", f"the result is typed as {result}", Patch(primitive, "types", change))


def _of_cast(source: str, to: str, change: Callable[..., Tensor]) -> Change:
    """A change of the transpose of one kind of `pcast`; others keep theirs."""

    def changed(transpose: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def broken(g: Tensor, shape: Any, held: str, wanted: str, axes: Any) -> Tensor:
            right = transpose(g, shape, held, wanted, axes)
            return change(g, right, axes) if (held, wanted) == (source, to) else right

        return broken

    return changed


TRANSPOSES = (
    _transpose(primitives.ALL_REDUCE, "psum", "a second sum over the ranks, as in JAX's pmap",
               lambda transpose: lambda g, shape, op, axes: transpose(
                   _ops.all_reduce(transpose(g, shape, op, axes), op, axes), shape, op, axes)),
    _transpose(primitives.ALL_REDUCE, "psum: factor", "the cotangent counts twice", _doubled),
    _transpose(primitives.ALL_REDUCE_UNREDUCED, "psum of unreduced", "the cotangent counts twice", _doubled),
    _transpose(primitives.ALL_REDUCE_UNREDUCED, "psum of unreduced: type", "the cotangent stays invariant",
               lambda _: lambda g, *args: g),
    _transpose(primitives.PCAST, "pcast to varying", "the gradient is not summed over the ranks",
               _of_cast(_I, _V, lambda g, right, axes: g)),
    _transpose(primitives.PCAST, "pcast to varying: mean", "the gradient is halved, as a mean over two ranks",
               _of_cast(_I, _V, lambda g, right, axes: right / 2)),
    _transpose(primitives.PCAST, "pcast to reduced", "the gradient is not summed over the ranks",
               _of_cast(_I, _R, lambda g, right, axes: g)),
    _transpose(primitives.PCAST, "pcast to unreduced", "the cotangent counts twice",
               _of_cast(_V, _U, lambda g, right, axes: 2 * right)),
    _transpose(primitives.PCAST, "pcast of reduced to varying", "the cotangent counts twice",
               _of_cast(_R, _V, lambda g, right, axes: 2 * right)),
    _transpose(primitives.ALL_GATHER, "all_gather", "ranks get the cotangents of chunks in reverse order",
               lambda transpose: lambda g, shape, dim, *rest: transpose(g.flip(dim), shape, dim, *rest)),
    _transpose(primitives.ALL_GATHER, "all_gather: factor", "the cotangent counts twice", _doubled),
    _transpose(primitives.REDUCE_SCATTER, "psum_scatter", "the cotangent counts twice", _doubled),
    _transpose(primitives.ALL_GATHER_INVARIANT, "all_gather to invariant", "a sum over the ranks of the cotangent",
               lambda _: lambda g, shape, dim, size, axes: _ops.reduce_scatter(
                   _ops.pcast(g, _I, _V, axes), "sum", dim, shape[dim], axes)),
    _transpose(primitives.ALL_GATHER_REDUCED, "all_gather to reduced", "the cotangent counts twice", _doubled),
    _transpose(primitives.REDUCE_SCATTER_UNREDUCED, "psum_scatter of unreduced", "the cotangent counts twice",
               _doubled),
    _transpose(primitives.ALL_TO_ALL, "all_to_all", "the cotangent counts twice", _doubled),
    _transpose(primitives.PERMUTE, "ppermute", "cotangents go on in the direction of the values",
               lambda _: lambda g, shape, sources, result, axes: _ops.permute(g, sources, list(shape), axes)),
    _transpose(primitives.SHARD, "the slice of an invariant value", "the cotangent counts twice", _doubled),
    _transpose(primitives.TO_PARTIAL, "check=False", "the cotangent goes to all ranks", lambda _: lambda g, *args: g),
    _transpose(primitives.TO_PARTIAL, "check=False: factor", "the cotangent counts twice", _doubled),
    _transpose(manual._ENTER, "enter", "the cotangent counts twice", _doubled),
    _transpose(manual._LEAVE, "leave", "the cotangent counts twice", _doubled),
    mutant("transposed specs", "the cotangent of an unreduced value is not reduced",
           Patch(manual, "_transposed", lambda f: lambda spec, reduced: (f(spec, reduced)[0], []))),
    mutant("derivative of pmax and pmin", "each rank that holds the extremum has all of the cotangent",
           Patch(_ALL_REDUCE, "_attained", lambda f: lambda *args: (f(*args)[0], torch.ones_like(f(*args)[1])))),
)  # fmt: skip

TYPES = (
    _types(primitives.ALL_REDUCE, "psum", _V),
    _types(primitives.ALL_REDUCE_UNREDUCED, "psum of unreduced", _U),
    mutant("type of pcast", "the result has the type of the operand",
           Patch(primitives.PCAST, "types", lambda f: lambda source, to, axes: {AxisType(source): AxisType(source)})),
    _types(primitives.ALL_GATHER, "all_gather", _I),
    _types(primitives.REDUCE_SCATTER, "psum_scatter", _I),
    _types(primitives.ALL_GATHER_INVARIANT, "all_gather to invariant", _V),
    _types(primitives.ALL_GATHER_REDUCED, "all_gather to reduced", _I),
    _types(primitives.REDUCE_SCATTER_UNREDUCED, "psum_scatter of unreduced", _U),
    _types(primitives.ALL_TO_ALL, "all_to_all", _I),
    _types(primitives.PERMUTE, "ppermute", _I),
    _types(primitives.SHARD, "the slice of an invariant value", _I),
    _types(primitives.TO_PARTIAL, "check=False", _I),
)  # fmt: skip


def _without(kind: AxisType, beside: AxisType) -> Change:
    """No cast of invariant values where `beside` is among the types and the values are to be of type `kind`."""

    def changed(wanted: Callable[..., dict[str, AxisType]]) -> Callable[..., dict[str, AxisType]]:
        def broken(self: Any, leaves: Any) -> dict[str, AxisType]:
            held = [self._types.of(value) for value in map(_value, leaves)]
            beside_it = lambda axis: any(types.get(axis, _I) is beside for types in held)  # noqa: E731
            found = wanted(self, leaves)
            return {axis: to for axis, to in found.items() if not (to is kind and beside_it(axis))}

        return broken

    return changed


def _value(leaf: Tensor) -> Any:
    from spmd.tracing.running import running_trace

    return running_trace().value(leaf)


CASTS = (
    mutant("casts: varying operands", "an invariant operand beside a varying one is not cast",
           Patch(Casts, "_wanted", _without(_V, _V))),
    mutant("casts: beside reduced", "an invariant operand beside a reduced one is not cast",
           Patch(Casts, "_wanted", _without(_R, _R))),
    mutant("casts: beside unreduced", "an invariant operand beside an unreduced one is not cast",
           Patch(Casts, "_wanted", _without(_R, _U))),
    mutant("casts: lists", "operands of functions of lists are not cast",
           replaced(Casts, "_elementwise", lambda self, args, name: args)),
    mutant("casts: cotangents", "a cotangent given to vjp is not cast to the type of the output",
           replaced(Casts, "_cotangents", lambda self, *args, **kwargs: _unchanged(*args, **kwargs))),
    mutant("casts: operands of collectives", "a collective does not cast an invariant operand",
           replaced(_FUNCTIONAL, "varying", lambda x, axes: x)),
    mutant("casts: unreduced operands", "psum takes an unreduced value for one that varies",
           replaced(_FUNCTIONAL, "_is_unreduced", lambda x, axes: False)),
    mutant("casts: results", "an invariant result is not cast where its spec shards it",
           replaced(_REGION, "cast_along", lambda leaf, axis, to: leaf)),
    mutant("casts: closed-over values", "a tensor from outside does not enter the body",
           replaced(Casts, "_entered", lambda self, leaf: leaf)),
    mutant("casts: free of charge", "a cast is no operation, so its transpose sums nothing",
           replaced(_CASTS, "cast_along", lambda leaf, axis, to: leaf)),
    mutant("types: entering", "an argument that a spec shards is typed as invariant",
           Patch(AxisTypes, "_enter", lambda f: lambda self, operation: _enter_invariant(f, self, operation))),
)  # fmt: skip


def _unchanged(outputs: Any, inputs: Any, grad_outputs: Any = None, *rest: Any, **options: Any) -> tuple[Any, ...]:
    names = ("retain_graph", "create_graph", "allow_unused", "is_grads_batched", "materialize_grads")
    options = dict(zip(names, rest, strict=False)) | options
    listed = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or [None] * len(listed))
    return (
        listed,
        inputs,
        given,
        options.get("retain_graph"),
        options.get("create_graph", False),
        True,
        options.get("allow_unused"),
        options.get("is_grads_batched", False),
        options.get("materialize_grads", False),
    )


def _enter_invariant(enter: Callable[..., None], types: Any, operation: Any) -> None:
    enter(types, operation)
    for value in operation.tensors:
        held = {axis: _I if kind is _V else kind for axis, kind in types.of(value).items()}
        types._types[value] = MappingProxyType(held)


def _swapped(kernel: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    return lambda group, calls: kernel(group, calls)[::-1]


def _with_kernel(op: torch._ops.OpOverload, name: str, breaks: str) -> Mutant:
    return mutant(name, breaks, Patch(primitives.COLLECTIVES[op], "run", _swapped))


VALUES = (
    _with_kernel(_ops.reduce_scatter.default, "psum_scatter: chunks", "ranks get each other's chunks"),
    _with_kernel(_ops.all_to_all.default, "all_to_all: chunks", "ranks get each other's chunks"),
    _with_kernel(_ops.permute.default, "ppermute: ranks", "ranks get each other's values"),
    mutant("several axes: order", "the last one is major",
           Patch(_FUNCTIONAL, "resolve_axes", lambda f: lambda name: tuple(part[::-1] for part in f(name)))),
    mutant("all_gather: vmap", "under vmap, a batched operand is joined along the dim before",
           Patch(primitives.ALL_GATHER, "batched", lambda f: lambda n, dim, size, axes: (dim, size, axes))),
)  # fmt: skip


def _balanced(length: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Chunks whose lengths differ by at most one, as of torch.tensor_split."""
    found = [(0, length)]
    for size in sizes:
        starts = [(a, b - a) for a, b in found]
        found = [(a + n * i // size, a + n * (i + 1) // size) for a, n in starts for i in range(size)]
    return tuple(found)


UNEVEN = (
    mutant("uneven shards: chunks of collectives", "ranks hold the chunks of torch.tensor_split",
           replaced("spmd.collectives.transport.group", "_bounds", _balanced)),
    mutant("uneven shards: programs", "all ranks have the program of the first one",
           replaced(Variants, "at", lambda self, coordinate: None)),
    mutant("uneven shards: shapes of results", "a result has the global shape that equal shards would have",
           replaced(LocalShapes, "global_shape", lambda self, number, spec, name: even_shape(
               self.unevenness.mesh, spec, self.of(number, (0,) * len(self.unevenness.mesh.names))))),
)  # fmt: skip

_UNREDUCED = ("pcast to unreduced", "pcast to reduced", "all_gather to reduced")
_WITHIN = {
    "all_to_all": ("all_to_all",),
    "ppermute": ("ppermute",),
    "pmax": ("pmax", "pmin"),
    "check=False": ("check=False",),
    "unreduced": _UNREDUCED,
    "beside": _UNREDUCED,
    "cotangents": ("vjp inside",),
    "vmap": ("vmap inside",),
    "to invariant": ("all_gather to invariant",),
    "to reduced": _UNREDUCED,
    "uneven": ("uneven",),
}
"""By a part of a mutant's name, what a program must have to be run for it."""


def _narrowed(found: tuple[Mutant, ...]) -> tuple[Mutant, ...]:
    """Mutants that only those programs are run for which are likely to show them."""
    needs = lambda name: next((words for part, words in _WITHIN.items() if part in name), ())  # noqa: E731
    return tuple(attrs.evolve(one, within=frozenset(needs(one.name))) for one in found)


FAMILIES: Mapping[str, tuple[Mutant, ...]] = MappingProxyType(
    {
        "Transposes": _narrowed(TRANSPOSES),
        "Types": _narrowed(TYPES),
        "Casts": _narrowed(CASTS),
        "Values": _narrowed(VALUES),
        "Uneven shards": _narrowed(UNEVEN),
    }
)
"""All mutants, grouped by what they break."""

MUTANTS: Mapping[str, Mutant] = MappingProxyType({one.name: one for family in FAMILIES.values() for one in family})
"""All mutants, by name."""
