"""Mutants of the passes: canonicalization, in-place writes, and the passes over a rank's program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import attrs
import torch

from proofs.fuzz.mutants.mutant import Patch, mutant, replaced, returning, with_entry
from spmd.ir.effects import Effect
from spmd.ir.graph import Graph, Operation
from spmd.lowering.passes import shards
from spmd.tracing.canonicalize import decompositions
from spmd.tracing.overlapping import OverlappingViews

aten = torch.ops.aten

_MASKED = "inplace_mask inplace_mask_rows inplace_mask_mapped inplace_mask_value"
_CANONICALIZE, _FORMS, _FILLS, _SIMPLIFY, _LOWER = (
    "spmd.tracing.canonicalize.canonicalize",
    "spmd.tracing.canonicalize.normal_forms",
    "spmd.tracing.canonicalize.constant_folding",
    "spmd.ir.simplify",
    "spmd.lowering.lower",
)


def _without(owner: str, table: str, *names: str) -> Patch:
    """Remove the passes of these names."""
    return Patch(owner, table, lambda passes: tuple(run for run in passes if run.__name__ not in names))


def _instead(owner: str, table: str, name: str, other: Callable[..., Any]) -> Patch:
    """Replace the pass of a name by another."""
    return Patch(owner, table, lambda passes: tuple(other if run.__name__ == name else run for run in passes))


def blind_to_draws(owner: str, table: str, name: str) -> Patch:
    """Make a pass treat random operators as deterministic ones."""

    def change(passes: Sequence[Callable[[Graph], Graph]]) -> tuple[Callable[[Graph], Graph], ...]:
        effect = Operation.effect

        def without_draws(operation: Operation) -> Effect | None:
            found: Effect | None = effect.__get__(operation)
            return None if found is Effect.RANDOM else found

        def blind(run: Callable[[Graph], Graph]) -> Callable[[Graph], Graph]:
            def blinded(graph: Graph) -> Graph:
                with mock.patch.object(Operation, "effect", property(without_draws)):
                    return run(graph)

            return blinded

        return tuple(blind(run) if run.__name__ == name else run for run in passes)

    return Patch(owner, table, change)


def _mean_of_all(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> torch.Tensor:
    return aten.sum.dim_IntList(x, dim, keepdim, **options) / x.numel()


def _first_element(element: Callable[..., Operation]) -> Callable[..., Operation]:
    def change(operation: Operation, op: Any, index: int, group: int) -> Operation:
        return attrs.evolve(element(operation, op, 0, group), results=(operation.results[index],))

    return change


def _reversed_lists(joined: tuple[Any, tuple[Any, ...], dict[str, Any]] | None) -> Any:
    if joined is None:
        return None
    op, (first, *others), options = joined
    return op, (first, *(item[::-1] if isinstance(item, list) else item for item in others)), options


def _keyed_without_options(operation: Operation) -> Any:
    return operation.op, _freeze(operation.args)


def _freeze(tree: Any) -> Any:
    return tuple(map(_freeze, tree)) if isinstance(tree, (tuple, list)) else tree


def _composed_backwards(join: Callable[..., Operation]) -> Callable[..., Operation]:
    def change(operation: Operation, producers: Any, any_shapes: bool) -> Operation:
        joined = join(operation, producers, any_shapes)
        if joined is operation or joined.op is not aten.permute.default:
            return joined
        order = list(joined.args[1])
        return attrs.evolve(joined, args=(joined.args[0], [order.index(dim) for dim in range(len(order))]))

    return change


def _inner_shapes(join: Callable[..., Operation]) -> Callable[..., Operation]:
    def change(operation: Operation, producers: Any, any_shapes: bool) -> Operation:
        before = producers.get(operation.args[0]) if operation.op is aten.reshape.default else None
        if before is None or before.op is not operation.op:
            return join(operation, producers, any_shapes)
        return attrs.evolve(operation, args=before.args)

    return change


def _shard_factories(graph: Graph) -> Graph:
    made = shards.shard_factories(graph)
    operations = (attrs.evolve(o, kwargs={}) if o.op is aten.full.default else o for o in made.operations)
    return attrs.evolve(made, operations=tuple(operations))


def _inverted(index: Any) -> Any:
    return ~index if isinstance(index, torch.Tensor) and index.dtype == torch.bool else index


MUTANTS = (
    mutant(
        "decompositions: mean",
        "a mean over some dims divides by the number of all elements",
        with_entry(_CANONICALIZE, "DECOMPOSITIONS", aten.mean.dim, _mean_of_all),
        within="mean_dim nanmean complex_mean inner_vmap",
    ),
    mutant(
        "decompositions: variance",
        "the degrees of freedom of a variance are one less than asked",
        with_entry(
            _CANONICALIZE,
            "DECOMPOSITIONS",
            aten.var.correction,
            lambda x, dim=None, **options: decompositions._var(x, dim, **{**options, "correction": 0.5}),
        ),
        within="var std var_mean var_all std_mean",
    ),
    mutant(
        "split_lists: element",
        "every element of a list operator is the first one",
        Patch("spmd.ir.list_operators", "_element", _first_element),
        within="foreach_add foreach_mul foreach_exp foreach_lerp foreach_addcmul foreach_norm",
    ),
    mutant(
        "split_lists: joined again",
        "operations joined to a list operator meet each other's second operands",
        returning("spmd.ir.list_schedule", "join_elements", _reversed_lists),
        within="foreach_add foreach_mul foreach_exp foreach_lerp foreach_addcmul foreach_norm",
    ),
    mutant(
        "normalize: transposed dims",
        "a transpose of two dims changes none",
        with_entry(_FORMS, "NORMAL_FORMS", aten.transpose.int, lambda o: (aten.alias.default, o.args[:1], {})),
        within="aten.permute.default",
    ),
    mutant(
        "normalize: conjugate",
        "a lazy conjugate is taken for the number itself",
        with_entry(_FORMS, "NORMAL_FORMS", aten._conj.default, lambda o: (aten.alias.default, o.args, {})),
        within="aten.conj_physical.default",
    ),
    mutant(
        "normalize: negative dims",
        "a negative dim counts from one dim too far",
        Patch(
            _FORMS,
            "_positive_dims",
            lambda normal: (
                lambda operation: (
                    attrs.evolve(operation, args=(operation.args[0], operation.args[1] - 1, *operation.args[2:]))
                    if len(operation.args) > 1 and operation.op is aten.select.int and operation.args[1] < 0
                    else normal(operation)
                )
            ),
        ),
        within="aten.select.int",
    ),
    mutant(
        "fold_constants: commutes",
        "a difference with a tensor of one number on its left side is turned around",
        Patch(_FILLS, "_COMMUTATIVE", lambda ops: ops | {aten.sub.Tensor, aten.div.Tensor}),
    ),
    mutant(
        "simplify: options",
        "operations that differ in keyword arguments are computed once",
        replaced(_SIMPLIFY, "_key", _keyed_without_options),
    ),
    mutant(
        "simplify: chain",
        "a permutation of a permutation is joined in the wrong order",
        Patch(_SIMPLIFY, "_join_chain", _composed_backwards),
        within="aten.permute.default",
    ),
    mutant(
        "simplify: identity",
        "a flip, which keeps the shape, is taken for an operation that does nothing",
        Patch(_SIMPLIFY, "RESHAPERS", lambda ops: ops | {aten.flip.default}),
        within="aten.flip.default",
    ),
    mutant(
        "simplify: neutral number",
        "an addition of 1 is taken for an operation that does nothing",
        Patch(_SIMPLIFY, "_ONE_IS_NEUTRAL", lambda ops: ops | {aten.add.Tensor}),
        within="aten.add.Tensor",
    ),
    mutant(
        "simplify: draws",
        "two equal draws are made once",
        blind_to_draws(_CANONICALIZE, "PASSES", "simplify"),
        within="rand_twice",
    ),
    mutant(
        "eliminate_dead: draws",
        "a draw that nobody reads is dropped",
        blind_to_draws(_CANONICALIZE, "PASSES", "eliminate_dead"),
        within="rand_unused",
    ),
    mutant(
        "functionalization: order of draws",
        "`bernoulli_` of a permuted tensor draws in the order of dims",
        with_entry(
            "spmd.tracing.functionalization",
            "REPLACEMENTS",
            torch.ops.aten.bernoulli_.float,
            lambda x, p=0.5: NotImplemented if x.is_contiguous() else x.copy_(x.new_empty(x.shape).bernoulli_(p)),
        ),
        within="rand_inplace rand_in_memory_order",
    ),
    mutant(
        "functionalization: lerp",
        "`lerp_` is left to torch's functionalization, which fails in forward mode",
        with_entry(
            "spmd.tracing.functionalization", "REPLACEMENTS", torch.ops.aten.lerp_.Scalar, lambda *args: NotImplemented
        ),
        with_entry(
            "spmd.tracing.functionalization", "REPLACEMENTS", torch.ops.aten.lerp_.Tensor, lambda *args: NotImplemented
        ),
        within="inplace_lerp inplace_lerp_pushed",
    ),
    mutant(
        "strides: writes",
        "what is written to gets the strides of the operands, by which later draws go",
        replaced("spmd.tracing.functionalization", "loses_strides", lambda func, args, kwargs: []),
        within="draw_after_write",
    ),
    mutant(
        "overlapping: writes",
        "a write through a view that repeats elements is left to functionalization",
        replaced(OverlappingViews, "write", lambda views, func, args, kwargs: None),
        within="inplace_expanded inplace_through_view inplace_through_strides",
    ),
    mutant(
        "overlapping: strided views",
        "views by `as_strided` and `unfold` are not remembered",
        replaced("spmd.tracing.overlapping", "_STRIDED", frozenset()),
        within="inplace_through_strides",
    ),
    mutant(
        "overlapping: fills",
        "a number written to one of several elements in a place is lost",
        replaced("spmd.tracing.overlapping", "_joined", lambda before, after, dims: before if dims else after),
        within="inplace_expanded inplace_through_view inplace_through_strides",
    ),
    mutant(
        "assignments: left out",
        "`x[mask] = number` is a write at places that are found",
        replaced("spmd.tracing.closures", "fill_masked", lambda x, index, value: False),
        within=_MASKED,
    ),
    mutant(
        "assignments: mask",
        "`x[mask] = number` writes where the mask is False",
        Patch(
            "spmd.tracing.closures",
            "fill_masked",
            lambda fill: lambda x, index, value: fill(x, _inverted(index), value),
        ),
        within=_MASKED,
    ),
    mutant(
        "as_strided: offset",
        "the offset of a strided view is not read",
        Patch(
            "spmd.tracing.recorder",
            "places",
            lambda places: lambda like, size, stride, _: places(like, size, stride, None),
        ),
        within="as_strided as_strided_as_laid_out inplace_through_view inplace_through_strides",
    ),
    mutant(
        "as_strided: order",
        "places that name all elements are taken to be in order",
        replaced("spmd.tracing.recorder", "in_order", lambda found, flat: len(found) == flat.numel()),
        within="as_strided as_strided_as_laid_out inplace_through_view inplace_through_strides",
    ),
    mutant(
        "as_strided: layout",
        "the tensor that is read by strides is taken for contiguous",
        Patch(
            "spmd.tracing.recorder",
            "places",
            lambda places: lambda like, *geometry: places(torch.empty(like.shape), *geometry),
        ),
        within="as_strided as_strided_as_laid_out inplace_through_view inplace_through_strides",
    ),
    mutant(
        "merge_reshapes: source",
        "a reshape of a reshape is the inner one",
        Patch(_SIMPLIFY, "_join_chain", _inner_shapes),
        within="aten.view.default",
    ),
    mutant(
        "simplify: shape only",
        "a permutation that keeps the shape is taken for an operation that does nothing",
        Patch(_SIMPLIFY, "RESHAPERS", lambda ops: ops | {aten.permute.default}),
        within="aten.permute.default",
    ),
    mutant(
        "simplify_local: draws",
        "two equal draws are made once in a rank's program",
        blind_to_draws(_LOWER, "PASSES", "simplify_local"),
        within="rand_twice",
    ),
    mutant(
        "eliminate_dead: draws of a rank",
        "a draw that nobody reads is dropped from a rank's program",
        blind_to_draws(_LOWER, "PASSES", "eliminate_dead"),
        within="rand_unused",
    ),
    mutant(
        "shard_factories: dtype",
        "a shard of a tensor of one number has the default dtype",
        _instead(_LOWER, "PASSES", "shard_factories", _shard_factories),
        within="aten.full.default",
    ),
    mutant(
        "insert_layout_copies: left out",
        "no operand is copied to the memory layout that its kernel needs",
        _without(_LOWER, "PASSES", "insert_layout_copies"),
        within="aten.native_group_norm.default aten.view_as_complex.default",
    ),
)
