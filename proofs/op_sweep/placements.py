"""The placements of the operands that are tried, the shards that ranks then hold, and the comparison of results."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterator, Sequence

import torch

from spmd.core.mesh import Mesh
from spmd.core.placement import REDUCTIONS, Partial, Placement, Replicate, Shard, supports_reduction
from spmd.core.shards import reduced, split
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.testing.rule_check.execute import split_placement

Combination = tuple[tuple[Placement, ...], ...]
"""For every operand, one placement per mesh axis."""


def combination_text(combination: Combination) -> str:
    """A combination, for messages."""
    return ", ".join("/".join(map(repr, placements)) for placements in combination)


def combinations(tensors: Sequence[torch.Tensor], mesh: Mesh, limit: int, partial: bool) -> Iterator[Combination]:
    """All combinations of placements if there are at most `limit`, else replication and a fixed sample of the others.

    Args:
        tensors: the operands.
        mesh: the mesh.
        limit: the largest number of combinations.
        partial: also try partial sums, maxima and minima.
    """
    options = [_options(tensor, mesh, partial) for tensor in tensors]
    total = math.prod(map(len, options))
    numbers = range(1, min(total, sys.maxsize))  # `len` fails for a longer range
    chosen = range(total) if total <= limit else [0, *random.Random(total).sample(numbers, limit - 1)]
    for number in chosen:
        combination = []
        for option in options:
            number, index = divmod(number, len(option))
            combination.append(option[index])
        yield tuple(combination)


def _options(tensor: torch.Tensor, mesh: Mesh, partial: bool) -> list[tuple[Placement, ...]]:
    single: list[Placement] = [Replicate(), *map(Shard, range(tensor.ndim))]
    if partial and _has_arithmetic(tensor.dtype):
        single += [Partial(op) for op in REDUCTIONS if supports_reduction(op, tensor.dtype)]
    return [option for option in itertools.product(single, repeat=len(mesh.names)) if _one_reduction(option)]


def _has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether values can be split into partial sums, which may be negative; floats of 8 bits cannot even be added."""
    return dtype == torch.bool or (dtype.is_signed and (dtype.itemsize > 1 or not dtype.is_floating_point))


def _one_reduction(option: Sequence[Placement]) -> bool:
    return len({placement.op for placement in option if isinstance(placement, Partial)}) <= 1


def spread(tensor: torch.Tensor, spec: DTensorSpec) -> tuple[torch.Tensor, ...]:
    """The shard of a tensor on every rank; a partial value is split into random parts."""
    axes = [axis for axis, _ in spec.partial]
    parts = [tensor]
    if axes:
        grouping = tuple((size,) for size in tensor.shape)
        generator = torch.Generator().manual_seed(0)
        parts = split_placement(tensor, grouping, Partial(spec.partial[0][1]), spec.mesh.axis_size(axes), generator)
        parts = _exact(tensor, parts) if spec.partial[0][1] == "sum" and tensor.is_floating_point() else parts
    return tuple(shard.clone() for shard in split(parts, spec))


def _exact(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts rounded to multiples of 1/64, and the first is the remainder: whole numbers then add up exactly."""
    rest = [(part * 64).round() / 64 for part in parts[1:]]
    return [tensor - sum(rest, torch.zeros_like(tensor)), *rest]


def difference(shards: Sequence[torch.Tensor], spec: DTensorSpec, expected: torch.Tensor, values: bool) -> str | None:
    """Why the shards of all ranks are not `expected` placed by `spec`; None if they are."""
    for rank, (coordinate, shard) in enumerate(zip(spec.mesh.coordinates(), shards, strict=True)):
        meta = TensorMeta(spec.local_shape(coordinate), expected.dtype)
        if TensorMeta.of(shard) != meta:
            return f"rank {rank} holds {TensorMeta.of(shard)}, expected {meta}"
    for rank, slices, whole in reduced(shards, spec) if values else ():
        reason = apart(whole, expected[slices])
        if reason is not None:
            return f"rank {rank}: {reason}"
    return None


def apart(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Why two tensors differ by more than rounding; None if they do not."""
    rtol, atol = _TOLERANCES.get(expected.dtype, (1e-4, 1e-5))
    if expected.dtype in _HALF:
        # The terms of a sum over ranks are rounded before they are added: where they cancel, their rounding remains.
        largest = expected.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if expected.numel() else 0.0
        atol = max(atol, torch.finfo(expected.dtype).eps * largest)
    if not (expected.is_floating_point() or expected.is_complex()) or expected.dtype.itemsize == 1:
        rtol, atol = 0.0, 0.0
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return "; ".join(str(error).splitlines()[2:4]) or "values differ"
    return None


_HALF = (torch.bfloat16, torch.float16, torch.complex32)
_TOLERANCES = {
    torch.float64: (1e-6, 1e-7),
    torch.complex128: (1e-6, 1e-7),
    torch.bfloat16: (3e-2, 1e-2),
    torch.float16: (4e-3, 2e-3),
    torch.complex32: (4e-3, 2e-3),
}
