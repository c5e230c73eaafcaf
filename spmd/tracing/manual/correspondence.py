"""Which operations of two ranks' programs correspond, where their shards in manual regions have other shapes.

The programs differ inside of manual regions only: in shapes, and perhaps in operators, as a derivative's formula may
depend on a size. What both have are *anchors*: all operations outside, those that enter or leave a region, and those
with effects, which all ranks run in the same order.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from spmd.collectives.manual import ENTER, LEAVE, ManualAxes
from spmd.collectives.primitives import COLLECTIVES
from spmd.core.mesh import Coordinate
from spmd.core.spec_text import parse_spec
from spmd.errors import DivergenceError, TraceError
from spmd.ir.dataflow import independent_values
from spmd.ir.effects import Effect
from spmd.ir.graph import Graph, Operation, Value, freeze, map_leaves
from spmd.ir.regions import BEGINS, GIVE, NEXT, PROCEED, STACK
from spmd.ir.variants import Key, Unevenness, Variants
from spmd.tracing.source import where

PASSES = (NEXT, GIVE, STACK, PROCEED)
"""The operators through which values pass out of a loop or a branch, or decide when it ends."""


def check_variants(graph: Graph) -> None:
    """Check that the programs of all ranks agree where they must.

    Raises:
        DivergenceError: ranks run different sequences of operations with effects, or call a collective together with
            shapes that do not fit; the message names two ranks.
        TraceError: programs differ outside of manual regions, or a region inside of another shards values.
    """
    if graph.variants is None:
        return
    _refuse_inner_shards(graph)
    for coordinate, other in graph.variants.graphs.values():
        Correspondence(graph, other, coordinate)
    _check_groups(graph, graph.variants)


def _refuse_inner_shards(graph: Graph) -> None:
    """TraceError for a value that is sharded where it enters or leaves a region inside of another one.

    The reshards around such a region are inside of the outer one, where each rank has its own program and the plan of
    coordinate zero says nothing of it.
    """
    inside = Inside(graph).values
    for operation in graph.operations:
        if operation.op not in (ENTER, LEAVE) or _is_replicated(operation.args[1]):
            continue
        if (operation.operands if operation.op is ENTER else operation.tensors)[0] in inside:
            raise TraceError(
                f"A shard_map inside of the body of another one has the spec {parse_spec(operation.args[1])!r} of "
                f"{operation.operands[0].meta}, at {where(operation.source)}, in a program with uneven shards. There "
                "such specs must be P(): make both manual over all axes in one shard_map, or pad the shards."
            )


def _is_replicated(spec: str) -> bool:
    parsed = parse_spec(spec)
    return not any(parsed.dims) and not parsed.partial


def _check_groups(graph: Graph, variants: Variants[Graph]) -> None:
    """Check that ranks which call a collective together hold shapes that fit, where all call the same ones."""
    unevenness = variants.unevenness
    first = unevenness.key((0,) * len(unevenness.mesh.names))
    programs = {first: graph, **{key: other for key, (_, other) in variants.graphs.items()}}
    calls = {key: Inside(program).calls for key, program in programs.items()}
    pairs = functools.cache(functools.partial(_pairs, unevenness))
    for number, operation in enumerate(calls[first]):
        if operation.op not in COLLECTIVES:
            continue
        for (mine, theirs), places in pairs(tuple(operation.args[-1])).items():
            a, b = calls[mine][number], calls[theirs][number]
            if _shapes_key(a) != _shapes_key(b):
                raise _divergence(a, b, *places)


def _pairs(unevenness: Unevenness, axes: Sequence[str]) -> dict[tuple[Key, Key], tuple[Coordinate, Coordinate]]:
    """The keys of ranks and of the first ranks in their groups along some axes, with coordinates that have them."""
    found: dict[tuple[Key, Key], tuple[Coordinate, Coordinate]] = {}
    for place in unevenness.mesh.coordinates():
        pairs = zip(unevenness.mesh.names, place, strict=True)
        first = tuple(0 if axis in axes else index for axis, index in pairs)
        found.setdefault((unevenness.key(first), unevenness.key(place)), (first, place))
    return found


class Correspondence:
    """The operations of a rank's program that correspond to those of coordinate zero's.

    Attributes:
        entered: for each value that enters a region, the operation of the other program.
        left: the same for values that leave; keyed by the operand and the arguments.
        effects: for the first result of each operation with an effect in a region, that of the other program.
        outside: for each value outside of regions, that of the other program, as far as it has it.
    """

    def __init__(self, graph: Graph, other: Graph, coordinate: Coordinate) -> None:
        self.graph, self.other, self.coordinate = graph, other, coordinate
        literals = _literals(graph, other), _literals(other, graph)
        mine, theirs = ([value for value, _ in made] for made in literals)
        self.manual = Inside(graph, mine), Inside(other, theirs)
        self.literals = {
            value: next((mine for mine, known in literals[0] if are_same(tensor, known)), value)
            for value, tensor in itertools.chain(*literals)
        }
        self.effects = self._match_effects()
        self.entered: dict[Value, Operation] = {}
        self.left: dict[Any, Operation] = {}
        self.outside: dict[Value, Value] = {}
        self._match_outside()

    def _match_effects(self) -> dict[Value, Operation]:
        mine, theirs = (inside.calls for inside in self.manual)
        for number in range(max(len(mine), len(theirs))):
            a, b = (listed[number] if number < len(listed) else None for listed in (mine, theirs))
            if a is None or b is None or self.manual[0].effect_key(a) != self.manual[1].effect_key(b):
                raise _divergence(a, b, (0,) * len(self.coordinate), self.coordinate)
        return {a.tensors[0]: b for a, b in zip(mine, theirs, strict=True)}

    def _match_outside(self) -> None:
        """Match what both programs have outside of regions; the other may lack what its results do not need."""
        mapped: dict[Value, Value] = dict(zip(self.other.inputs, self.graph.inputs, strict=True))
        same = {id(tensor): value for value, tensor in self.graph.constants}
        mapped |= {value: same[id(tensor)] for value, tensor in self.other.constants if id(tensor) in same}
        candidates: dict[Any, list[Operation]] = defaultdict(list)  # equal ones in their order
        for mine in reversed(self.manual[0].anchors):
            candidates[self._key(mine, None, 0)].append(mine)
        for operation in self.manual[1].anchors:
            found = candidates.get(self._key(operation, mapped, 1))
            if not found:
                raise self._missing(operation)
            mine = found.pop()
            if operation.op is ENTER:
                self.entered[mine.tensors[0]] = operation
            else:
                if operation.op is LEAVE:
                    self.left[leave_key(mine)] = operation
                if operation.tensors[0] not in self.manual[1].values:
                    mapped.update(zip(operation.tensors, mine.tensors, strict=True))
        self.outside = {its: value for value, its in mapped.items()}

    def _missing(self, operation: Operation) -> TraceError:
        if operation.effect is Effect.RANDOM:
            return TraceError(
                f"{operation.op} at {where(operation.source)} draws random numbers of another shape on the rank at "
                f"{self.coordinate} than on the one at {(0,) * len(self.coordinate)}, after which the generators of "
                "the ranks would differ. Draw a shape that all ranks have, and take a part of it."
            )
        return TraceError(
            f"{operation.op} at {where(operation.source)} runs on the rank at {self.coordinate} only: outside of a "
            "shard_map body the program must not depend on the shapes of its shards."
        )

    def _key(self, operation: Operation, mapped: Mapping[Value, Value] | None, side: int) -> Any:
        """What is equal for corresponding operations outside of regions; of a value inside, only that it is inside."""
        inside = self.manual[side]

        def known(value: Value) -> Any:
            if value in inside.values:
                return None
            if value in self.literals:
                return self.literals[value]
            if value in inside.free or value in inside.own:
                return of_call(inside.producers[value]), inside.producers[value].tensors.index(value)
            return value if mapped is None else mapped.get(value, value)

        def of_call(call: Operation) -> Any:
            args = map_leaves(lambda leaf: known(leaf) if isinstance(leaf, Value) else leaf, call.args)
            return call.op, freeze(args), freeze(dict(call.kwargs))

        if operation.op is ENTER:
            (value,) = operation.operands
            return ENTER, None if value in inside.free else known(value), freeze(operation.args[1:-1])
        if operation.op is LEAVE:
            inner = operation.tensors[0] in inside.values  # of a rank of the region around, and of its shape
            return LEAVE, freeze(operation.args[1 : -1 if inner else None])
        return of_call(operation)


def _literals(graph: Graph, other: Graph) -> list[tuple[Value, torch.Tensor]]:
    """The constants of a program that another one lacks: literals such as `torch.tensor([1.0])`, made in each trace.

    What the function closes over is one tensor in all programs.
    """
    shared = {id(tensor) for _, tensor in other.constants}
    return [(value, tensor) for value, tensor in graph.constants if id(tensor) not in shared]


def are_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two constants are one tensor, or of the same numbers, as of `torch.tensor([1.0])` traced twice."""
    if tensor is other or (tensor.shape, tensor.dtype) != (other.shape, other.dtype) or tensor.is_meta:
        return tensor is other
    differs = (tensor != other) & ((tensor == tensor) | (other == other))  # NaNs are the same
    return not bool(differs.any())


class Inside:
    """Which operations of a program are inside of manual regions.

    Args:
        graph: the program.
        literals: the constants that each trace makes, such as `torch.tensor([x.shape[0]])` in a body.

    Attributes:
        values: the values that are what one rank holds.
        free: those that depend on no input, which may be used on both sides; not what leaves a region.
        anchors: the operations outside, and those that enter or leave, but for constants that are made inside.
        producers: the operation of each value.
        own: what is computed from literals and nothing else, which may be used on both sides, too.
        loops: the loops and branches inside, each as all of its operations; those inside of others are parts of them.
        loop_of: by operation of such a one, its number.
    """

    def __init__(self, graph: Graph, literals: Iterable[Value] = ()) -> None:
        self.graph = graph
        self.values = ManualAxes.of(graph)
        self.producers = graph.producers
        left = {value for value, operation in self.producers.items() if operation.op is LEAVE}
        self.free = independent_values(graph) - self.values.keys() - left
        self.own = set(literals)
        for operation in graph.operations if self.own else ():
            known = all(value in self.own or value in self.free for value in operation.operands)
            if known and not self.own.isdisjoint(operation.operands) and operation.op is not ENTER:
                self.own.update(operation.tensors)
        self.loops = self._loops()
        self.loop_of = {operation: number for number, loop in enumerate(self.loops) for operation in loop}
        self.anchors = [operation for operation in graph.operations if self.is_anchor(operation)]

    def _loops(self) -> list[tuple[Operation, ...]]:
        regions, found = self.graph.regions, list[tuple[Operation, ...]]()
        for operation in self.graph.operations if regions else ():
            if operation.op not in BEGINS or (found and operation in found[-1]):
                continue
            if self._is_inside(operation):
                found.append(regions.whole(operation))
        return found

    def _is_inside(self, begin: Operation) -> bool:
        """Whether a loop or a branch takes or leaves what one rank holds; a region in its body does neither."""
        operations = self.graph.regions.inside(begin)
        made = {value for operation in operations for value in operation.tensors}
        taken = {value for operation in operations for value in operation.operands} - made
        left = self.graph.regions.of_sides(begin, *PASSES)
        return not taken.isdisjoint(self.values) or any(map(self.holds, left))

    @functools.cached_property
    def calls(self) -> list[Operation]:
        """The operations with effects inside of regions, which all ranks must call in the same order."""
        return [operation for operation in self.graph.operations if self.has_effect(operation)]

    def holds(self, operation: Operation) -> bool:
        """Whether an operation is inside of a region, or its value leaves one."""
        return any(value in self.values for value in (*operation.operands, *operation.tensors))

    def effect_key(self, operation: Operation) -> Any:
        """What all ranks must call alike, in loops of equal length that begin before the same one."""
        path = self.graph.regions.path(operation)
        around = [(opens.op, freeze(_given(opens)), self._first_calls[opens] is operation) for opens in path]
        return _effect_key(operation), tuple(around)

    @functools.cached_property
    def _first_calls(self) -> dict[Operation, Operation]:
        """By what opens a loop or a side of a branch, the first of `calls` in it."""
        found: dict[Operation, Operation] = {}
        for operation in self.calls:
            for opens in self.graph.regions.path(operation):
                found.setdefault(opens, operation)
        return found

    def is_free(self, operation: Operation) -> bool:
        """Whether an operation depends on nothing, so that both sides may use it."""
        return all(value in self.free for value in operation.tensors) and operation.effect is None

    def has_effect(self, operation: Operation) -> bool:
        """Whether an operation has an effect inside of a region; what prints no values may be inside, too.

        Not a loop or a branch itself: one without any such operation is a rank's own.
        """
        if operation.effect is Effect.HOST and not operation.operands:
            return True
        return operation.effect not in (None, Effect.REGION) and self.holds(operation)

    def is_anchor(self, operation: Operation) -> bool:
        """Whether an operation is outside, or enters or leaves a region; not of constants that are made there."""
        if not self.own.isdisjoint(operation.tensors) or (operation.op is ENTER and operation.operands[0] in self.own):
            return False
        if operation in self.loop_of:
            return False
        own = self.holds(operation) or self.is_free(operation) or self.has_effect(operation)
        return operation.op in (ENTER, LEAVE) or not own


def _effect_key(operation: Operation) -> Any:
    """What all ranks must call alike: an operator, its axes, and what of its arguments depends on no shape."""
    if operation.effect is Effect.HOST:
        return operation.op
    if operation.effect is Effect.RANDOM:
        return operation.op, tuple(value.meta for value in operation.tensors)
    collective = COLLECTIVES.get(operation.op)
    if collective is None:
        return operation.op, freeze(_given(operation))
    _, *args, axes = operation.args
    return operation.op, freeze(collective.alike(*args)), freeze(axes)


def _shapes_key(operation: Operation) -> Any:
    """What is equal for the ranks that call a collective together; lengths of chunks and of ragged rows may differ."""
    meta, args = operation.operands[0].meta, operation.args[1:-1]
    return meta.dtype, COLLECTIVES[operation.op].fits(meta.shape, *args)


def _given(operation: Operation) -> list[Any]:
    """The arguments of a call that are no values."""
    hide = lambda leaf: None if isinstance(leaf, Value) else leaf  # noqa: E731
    return [leaf for leaf in map_leaves(hide, operation.args) if leaf is not None]


def _divergence(
    mine: Operation | None, theirs: Operation | None, place: Coordinate, other: Coordinate
) -> DivergenceError:
    return DivergenceError(
        f"Ranks whose shards differ in shape call different collectives in a shard_map body: the rank at {place} calls "
        f"{_called(mine)} where the one at {other} calls {_called(theirs)}. All ranks must call the same ones, in the "
        "same order, with equal arguments: branch on shapes only around local operators, and pass size= to all_gather "
        "and psum_scatter of uneven shards."
    )


def _called(operation: Operation | None) -> str:
    if operation is None:
        return "nothing more"
    metas = ", ".join(str(value.meta) for value in operation.operands)
    return f"{operation.name} of {metas} at {where(operation.source)}"


def leave_key(operation: Operation) -> Any:
    """What tells a `leave` from others of its program, also in a plan, which keeps per-rank values."""
    return operation.args[0], freeze(operation.args[1:])
