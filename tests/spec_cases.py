"""Specs, and shards laid out by them: what tests of resharding have in common."""

import itertools

import torch

from spmd.core.placement import combine
from spmd.core.spec import DTensorSpec, P


def all_specs(mesh, meta, ops=("sum", "max")):
    """Every spec: each axis replicated, partial, or on a dim, in every order of the axes of a dim."""
    choices = [None, "partial", *range(meta.ndim)]
    specs = {}
    for order in itertools.permutations(mesh.names):
        for places in itertools.product(choices, repeat=len(order)):
            for op in ops:
                dims = [tuple(a for a, p in zip(order, places, strict=True) if p == dim) for dim in range(meta.ndim)]
                partial = {a: op for a, p in zip(order, places, strict=True) if p == "partial"}
                specs[DTensorSpec.make(mesh, P(*dims, partial=partial), meta)] = None
    return list(specs)


def split(spec, generator):
    """Adversarial shards of a random whole: every rank's part is a whole number of either sign, nothing cancels."""
    mesh, axes = spec.mesh, tuple(axis for axis, _ in spec.partial)
    parts = [
        torch.randint(-9, 10, spec.meta.shape, generator=generator).to(spec.meta.dtype)
        for _ in range(mesh.axis_size(axes))
    ]
    whole = parts[0]
    for part in parts[1:]:
        whole = combine(spec.partial[0][1], whole, part)
    shards = [parts[mesh.axis_index(c, axes)][spec.local_slices(c)].clone() for c in mesh.coordinates()]
    return shards, whole
