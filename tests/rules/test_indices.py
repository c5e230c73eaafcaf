"""Positions out of range, in sharded dims and elsewhere: the error of one device, on every plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from index_cases import CASES, KINDS, IndexCase, positions

import spmd
from spmd import P
from spmd.core.pytree import tree_leaves
from spmd.ir.refusals import refuses_positions

REFUSALS = (IndexError, RuntimeError)
"""What torch raises where a position is out of range; SpmdError is none of them."""

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """The tensors that a function returns, or the type of its error."""
    try:
        return [leaf.full_tensor() if isinstance(leaf, spmd.DTensor) else leaf for leaf in tree_leaves(function(*args))]
    except REFUSALS as error:
        return type(error)


def agree(one: Any, sharded: Any, *, kinds: bool = True) -> bool:
    if isinstance(one, type) or isinstance(sharded, type):
        return one == sharded if kinds else isinstance(one, type) and isinstance(sharded, type)
    return all(itertools.starmap(torch.allclose, zip(one, sharded, strict=True)))


def specs(shapes: Sequence[Sequence[int]], axes: Any) -> Iterator[tuple[P, ...]]:
    """Each dim of each argument sharded over `axes`, alone."""
    for number, shape in enumerate(shapes):
        for dim in range(len(shape)):
            yield tuple(P(*[None] * dim, axes) if other == number else P() for other in range(len(shapes)))


def gradient(case: IndexCase) -> Callable[..., Any]:
    """The gradients of a weighted sum of the results with respect to the tensors."""

    def loss(*args: torch.Tensor) -> torch.Tensor:
        result = case.function(*args)
        return (result * torch.arange(1.0, result.numel() + 1).reshape(result.shape)).sum()

    return torch.func.grad(loss, tuple(range(len(case.shapes))))


def arguments(case: IndexCase, kind: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in case.shapes]
    return [*tensors, positions(case, kind, generator)]


def sharded(function: Callable[..., Any], spec: tuple[P, ...], **axes: int) -> Callable[..., Any]:
    return spmd.jit(function, mesh=spmd.make_mesh(axes, runtime="virtual"), in_specs=spec)


@pytest.mark.parametrize("name", CASES)
def test_one_device_decides(name):
    case = CASES[name]
    step = sharded(case.function, next(specs([*case.shapes, case.index], "x")), x=3)
    for kind in ("right", "past"):
        args = arguments(case, kind)
        assert agree(outcome(case.function, *args), outcome(step, *args)), kind


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 3}, {"x": 8}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_one_device_decides_in_every_dim(name, axes):
    case = CASES[name]
    functions = [case.function, *([gradient(case)] if case.has_gradient else [])]
    for function, spec in itertools.product(functions, specs([*case.shapes, case.index], tuple(axes))):
        step = sharded(function, spec, **axes)
        for kind in KINDS:
            args = arguments(case, kind)
            # a gradient looks the same positions up by another operator, which one rank may run first
            equal = agree(outcome(function, *args), outcome(step, *args), kinds=function is case.function)
            assert equal, (spec, kind, "gradient" if function is not case.function else "value")


@pytest.mark.parametrize("rows", [64, 4096])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_the_size_of_a_table_makes_no_difference(rows, spec):
    step = sharded(lambda w, i: F.embedding(i, w), (spec, P()), x=2)
    with pytest.raises(IndexError, match=r"out of range.*\n.*test_indices\.py"):
        step(torch.randn(rows, 8), torch.tensor([1, rows + 3]))


def test_labels_are_named_and_may_be_ignored():
    step = sharded(F.cross_entropy, (P(None, "x"), P()), x=2)
    scores = torch.randn(3, 4096)
    with pytest.raises(IndexError, match="Target 4099 is out of bounds"):
        step(scores, torch.tensor([1, 4099, -100]))
    labels = torch.tensor([1, 4095, -100])
    assert torch.allclose(F.cross_entropy(scores, labels), step(scores, labels).full_tensor())


def test_a_loss_of_an_ignored_class_is_not_nan():
    scores = torch.tensor([[-torch.inf, -0.5, 0.0, -1.0]] * 3)
    function = lambda x, i: F.nll_loss(x, i, ignore_index=0, reduction="none")  # noqa: E731
    args = scores, torch.tensor([0, 1, 2])
    one, result = function(*args), sharded(function, (P(None, "x"), P()), x=2)(*args).full_tensor()
    assert (one.tolist(), one.signbit().tolist()) == (result.tolist(), result.signbit().tolist())


def test_a_lookup_keeps_the_sign_of_zero():
    table, index = torch.full((8, 4), -0.0), torch.tensor([0, 5, 7])
    lookups = [
        lambda w, i: F.embedding(i, w),
        lambda w, i: w.gather(0, i[:, None].expand(-1, 4).contiguous()),
        lambda w, i: w.index_add(0, i, torch.ones(3, 4)),
    ]
    for function, spec in itertools.product(lookups, [(P("x"), P()), (P(None, "x"), P()), (P(), P("x"))]):
        result = sharded(function, spec, x=3)(table, index).full_tensor()
        assert torch.equal(function(table, index).signbit(), result.signbit())
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    partial = spmd.distribute(torch.tensor([-0.0]), P(partial={"x": "sum"}), mesh=mesh)
    assert partial.full_tensor().signbit().item()


def test_an_unused_lookup_is_checked():
    def unused(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        F.embedding(i, w)
        return w * 2

    step = sharded(unused, (P("x"), P()), x=2)
    step(torch.ones(6, 2), torch.tensor([5]))
    with pytest.raises(IndexError, match="out of range"):
        step(torch.ones(6, 2), torch.tensor([6]))


def test_each_operator_with_positions_is_known():
    """Of torch's functional operators; those of sparse tensors have no rules."""
    decomposed = {"_unsafe_index", "_unsafe_index_put", "_index_put_impl", "embedding_renorm"}
    in_range = {"_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "segment_reduce"}
    found, refused = set(), set()
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
        if not full.startswith("aten::") or composite or any(word in name for word in ("sparse", "backward")):
            continue
        schema = torch._C._get_schema(f"aten::{name}", overload)
        given = {argument.name for argument in schema.arguments if "Tensor" in str(argument.type)}
        if given & {"index", "indices"} and not schema.is_mutable:
            found.add(name)
            refused |= (
                {name} if refuses_positions(getattr(getattr(torch.ops.aten, name), overload or "default")) else set()
            )
    assert decomposed | in_range == found - refused
