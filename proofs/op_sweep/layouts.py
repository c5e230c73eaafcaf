"""Calls whose operands have other memory layouts: views of the function's arguments, or copies of such views."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from proofs.op_sweep.cases import Case, Function, dense_cases, is_differentiable, with_every_gradient
from proofs.op_sweep.placements import apart
from spmd.testing.rule_check.execute import FAILURES
from spmd.testing.rule_check.strides import MemoryLayout, layouts

_SEARCHED = 100
"""The most calls of an entry that are considered."""

_KINDS = ("dims reversed", "every other column", "expanded along", "channels last")


def layout_cases(entry: Any, samples: int, backward: bool = False, device: str = "cpu") -> Iterator[Case]:
    """Up to `samples` cases that cycle through the calls of an entry, by numbers of dims, and through layouts.

    Each operand has a different layout. In the second half of the cases, the operand is a contiguous copy of a view
    with that layout, since tracing removes such copies. With `backward`, the gradients are those of the tensors that
    hold the operands, and the cotangents have layouts too.
    """
    found = _by_dims(dense_cases(entry, _SEARCHED, backward, device=device))
    for number in range(samples if found else 0):
        copied = number >= samples // 2
        plain = found[number % len(found)]
        case = restrided(plain, range(len(plain.tensors)), number, copied)
        if case.values and "expanded" in case.label and _is_left_to_rounding(case):
            continue
        if not backward:
            yield case
        elif entry.supports_autograd and is_differentiable(plain):
            with contextlib.suppress(*FAILURES):  # the operator may refuse expanded values, equal along a dim
                case = with_every_gradient(case)
                yield restrided(case, range(len(plain.tensors), len(case.tensors)), number + 1, copied)


def _is_left_to_rounding(case: Case) -> bool:
    """Whether results depend on rounding of the operands, as singular vectors of equal columns do."""
    results = []
    for nudge in (0, 4 * torch.finfo(torch.float64).eps):
        torch.manual_seed(0)
        try:
            results.append(case.function(*(_nudged(tensor, nudge) for tensor in case.tensors)))
        except Exception:  # the sweep reports it
            return False
    return any(
        apart(other, one) is not None for one, other in zip(*results, strict=True) if one.layout is torch.strided
    )


def _nudged(tensor: torch.Tensor, nudge: float) -> torch.Tensor:
    """A tensor with changed last digits; whole numbers do not change, since they may be labels."""
    if tensor.dtype not in (torch.float64, torch.complex128) or tensor.layout is not torch.strided:
        return tensor.clone()
    moved = tensor * (1 + nudge * torch.randn(tensor.shape, dtype=torch.float64))
    return moved if tensor.is_complex() else torch.where(tensor == tensor.round(), tensor, moved)


def _by_dims(found: Iterable[Case]) -> list[Case]:
    """The calls in turns by their operands' numbers of dims, so that the first ones differ in these."""
    kinds: dict[tuple[int, ...], list[Case]] = {}
    for case in found:
        kinds.setdefault(tuple(tensor.ndim for tensor in case.tensors), []).append(case)
    return [case for turn in itertools.zip_longest(*kinds.values()) for case in turn if case is not None]


def restrided(case: Case, positions: Sequence[int], number: int, copied: bool) -> Case:
    """A case in which some operands are views of the function's arguments, or copies of such views."""
    chosen = {position: _layout(case.tensors[position], number + position) for position in positions}
    views = {position: _view(layout, copied) for position, layout in chosen.items() if layout is not None}
    held = tuple(
        layout.hold(tensor.contiguous()) if (layout := chosen.get(position)) is not None else tensor
        for position, tensor in enumerate(case.tensors)
    )

    def viewed(inner: Function) -> Function:
        return lambda *held: inner(*(views[n](tensor) if n in views else tensor for n, tensor in enumerate(held)))

    names = ", ".join(layout.name if layout is not None else "as it is" for layout in chosen.values())
    label = f"{case.label}; {'copies of ' if copied else ''}{names}"
    return attrs.evolve(case.mapped(viewed), label=label, tensors=held)


def _view(layout: MemoryLayout, copied: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    if not copied:
        return layout.view
    return lambda held: layout.view(held).clone(memory_format=torch.contiguous_format)


def _layout(tensor: torch.Tensor, number: int) -> MemoryLayout | None:
    """One of the layouts that a tensor can have, by number; None if it can have no other layout."""
    options = list(layouts(tensor)) if tensor.ndim and tensor.layout is torch.strided else []
    kinds = [[option for option in options if option.name.startswith(kind)] for kind in _KINDS]
    able: list[Any] = [kind for kind in kinds if kind]
    if not able:
        return None
    turn, index = divmod(number, len(able))
    return able[index][turn % len(able[index])]
