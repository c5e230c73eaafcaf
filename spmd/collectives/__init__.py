"""Collectives between the ranks of a mesh: functions with the names of `jax.lax`, and the primitives underneath."""

from spmd.collectives.environment import axis_environment, axis_size
from spmd.collectives.functional import (
    all_gather,
    all_to_all,
    axis_index,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    shard_offset,
)
from spmd.collectives.ragged import ragged_all_to_all

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_environment",
    "axis_index",
    "axis_size",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "ragged_all_to_all",
    "shard_offset",
]
