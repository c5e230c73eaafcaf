"""Hypothesis strategies for meshes, shapes, specs, and sharded tensors.

Sizes are small, from 0, so that meshes of a few ranks have even, uneven and empty shards.
"""

from __future__ import annotations

import functools

import torch
from hypothesis import strategies as st

from spmd.core.mesh import Mesh, make_mesh
from spmd.core.placement import REDUCTIONS, Reduction, combine, supports_reduction
from spmd.core.shards import split
from spmd.core.spec import DTensorSpec, P, TensorMeta

AXIS_NAMES = ("data", "model", "pipe")
"""The names of drawn mesh axes, in mesh order."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)
"""The dtypes that are drawn by default."""


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 3, max_size: int = 4) -> Mesh:
    """Virtual meshes of one to `max_axes` axes, each of 1 to `max_size` ranks; they shrink to one axis of one rank."""
    sizes = draw(st.lists(st.integers(1, max_size), min_size=1, max_size=min(max_axes, len(AXIS_NAMES))))
    return make_mesh(dict(zip(AXIS_NAMES, sizes, strict=False)), runtime="virtual")


def shapes(max_dims: int = 3, max_size: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to `max_dims` dims of 0 to `max_size` elements."""
    return st.lists(st.integers(0, max_size), max_size=max_dims).map(tuple)


@st.composite
def pspecs(draw: st.DrawFn, axes: tuple[str, ...], ndim: int, reductions: tuple[Reduction, ...] = REDUCTIONS) -> P:
    """Specs of an `ndim`-dim tensor: each axis shards a dim, in any order of axes, is partial, or is replicated.

    Args:
        draw: given by Hypothesis.
        axes: the mesh axes to choose from.
        ndim: the number of tensor dims.
        reductions: the reductions to choose from; empty for specs that are not partial.
    """
    op = draw(st.sampled_from(reductions)) if reductions else None
    dims: list[list[str]] = [[] for _ in range(ndim)]
    partial: dict[str, Reduction] = {}
    replicate, pending = -1, -2
    choices = [replicate, *range(ndim), *([pending] if op else [])]
    for axis in draw(st.permutations(axes)):
        choice = draw(st.sampled_from(choices))
        if choice >= 0:
            dims[choice].append(axis)
        elif choice == pending and op is not None:
            partial[axis] = op
    return P(*dims, partial=partial)


@st.composite
def tensor_specs(
    draw: st.DrawFn,
    mesh: Mesh | None = None,
    meta: TensorMeta | None = None,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    partial: bool = True,
) -> DTensorSpec:
    """Specs with mesh and meta.

    Args:
        draw: given by Hypothesis.
        mesh: the mesh; by default it is drawn.
        meta: shape and dtype of the tensor; by default they are drawn.
        dtypes: the dtypes to draw from.
        partial: whether specs may be partial.
    """
    mesh = draw(meshes()) if mesh is None else mesh
    meta = TensorMeta(draw(shapes()), draw(st.sampled_from(dtypes))) if meta is None else meta
    reductions = tuple(op for op in REDUCTIONS if partial and supports_reduction(op, meta.dtype))
    return DTensorSpec.make(mesh, draw(pspecs(mesh.names, meta.ndim, reductions)), meta)


@st.composite
def tensors(draw: st.DrawFn, meta: TensorMeta) -> torch.Tensor:
    """Tensors of small integers, whose sums are exact in every dtype, with the shape and dtype of `meta`."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    if meta.dtype == torch.bool:
        return torch.randint(0, 2, meta.shape, generator=generator).bool()
    return torch.randint(-3, 4, meta.shape, generator=generator).to(meta.dtype)


@st.composite
def shards(draw: st.DrawFn, spec: DTensorSpec) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The shards of all ranks in rank order, and the global tensor.

    Replicas are equal. Partial shards are adversarial: every rank holds random values, instead of neutral elements.
    """
    mesh = spec.mesh
    pending = tuple(axis for axis, _ in spec.partial)
    parts = [draw(tensors(spec.meta)) for _ in range(mesh.axis_size(pending))]
    whole = functools.reduce(lambda left, right: combine(spec.partial[0][1], left, right), parts)
    return tuple(shard.clone() for shard in split(parts, spec)), whole
