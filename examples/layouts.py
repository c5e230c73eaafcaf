"""Where a GPT's arrays live: the six usual strategies, each as a pytree of specs.

A strategy names the axes `data` and `model`. An axis that a mesh lacks is left out of the specs, so every strategy
runs on every mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs
import optree
from torch import Tensor

import gpt
import spmd
from spmd import P


@attrs.frozen
class Strategy:
    """How a training step is spread.

    Args:
        mesh: the mesh that shows it best.
        tensor_parallel: heads, hidden features and vocabulary over `model` (Megatron).
        fully_sharded: every parameter also over `data` (ZeRO-3, FSDP).
        sequence_parallel: the residual stream's sequence over `model` between the layers.
    """

    mesh: Mapping[str, int]
    tensor_parallel: bool = False
    fully_sharded: bool = False
    sequence_parallel: bool = False

    def mesh_of(self, ranks: int) -> dict[str, int]:
        """The axes of a mesh of so many ranks: of two axes, `data` is the smaller one, as in `mesh`.

        >>> STRATEGIES["dp_tp"].mesh_of(16), STRATEGIES["fsdp"].mesh_of(16)
        ({'data': 4, 'model': 4}, {'data': 16})
        """
        if len(self.mesh) == 1:
            return dict.fromkeys(self.mesh, ranks)
        data = max(size for size in range(1, math.isqrt(ranks) + 1) if ranks % size == 0)
        return {"data": data, "model": ranks // data}


STRATEGIES = {
    "dp": Strategy({"data": 8}),
    "fsdp": Strategy({"data": 8}, fully_sharded=True),
    "tp": Strategy({"model": 8}, tensor_parallel=True),
    "dp_tp": Strategy({"data": 2, "model": 4}, tensor_parallel=True),
    "fsdp_tp": Strategy({"data": 2, "model": 4}, tensor_parallel=True, fully_sharded=True),
    "sp": Strategy({"model": 8}, tensor_parallel=True, sequence_parallel=True),
}

NORM = {"weight": P(), "bias": P()}
COLUMNS, ROWS = P("model"), P(None, "model")
"""Weights are `[out, in]`: split by output features, and by input features."""

BLOCK = {
    "norm1": NORM,
    "q": COLUMNS,
    "k": COLUMNS,
    "v": COLUMNS,
    "o": ROWS,
    "norm2": NORM,
    "up": {"weight": COLUMNS, "bias": P("model")},
    "down": {"weight": ROWS, "bias": P()},
}


def param_specs(strategy: Strategy, mesh: spmd.Mesh, config: gpt.Config) -> gpt.Params:
    """The spec of every parameter of `gpt.init(config)`."""
    blocks = [BLOCK] * config.layers
    specs = {"tokens": P("model"), "positions": P(), "blocks": blocks, "norm": NORM, "head": P("model")}
    if not strategy.tensor_parallel:
        specs = optree.tree_map(lambda _: P(), specs)
    specs = optree.tree_map(lambda spec: on(mesh, spec), specs)
    if strategy.fully_sharded and "data" in mesh.names:
        params = gpt.init(attrs.evolve(config, scan=False))
        specs = optree.tree_map(lambda spec, param: _shard_fully(spec, param, mesh), specs, params)
    if config.scan:
        specs["blocks"] = optree.tree_map(lambda spec: P(None, *spec.dims), specs["blocks"][0])
    return specs


def batch_spec(mesh: spmd.Mesh) -> P:
    """The spec of tokens and targets: the batch over `data`."""
    return on(mesh, P("data"))


def residual(strategy: Strategy, mesh: spmd.Mesh) -> Callable[[Tensor], Tensor]:
    """What `gpt.forward` does to the residual stream, `[batch, context, width]`."""
    if not strategy.sequence_parallel:
        return lambda x: x
    return lambda x: spmd.constrain(x, on(mesh, P("data", "model")))


def on(mesh: spmd.Mesh, spec: P) -> P:
    """`spec` without the axes that `mesh` lacks."""
    return P(*(tuple(axis for axis in axes if axis in mesh.names) for axes in spec.dims))


def _shard_fully(spec: P, param: Tensor, mesh: spmd.Mesh) -> P:
    """`spec` with `data` the minor axis of the largest dim that it divides, or of the largest if it divides none."""
    dims = [*spec.dims, *[()] * (param.ndim - len(spec.dims))]
    ranks = [mesh.axis_size((*axes, "data")) for axes in dims]
    chosen = max(range(param.ndim), key=lambda dim: (param.shape[dim] % ranks[dim] == 0, param.shape[dim], -dim))
    dims[chosen] = (*dims[chosen], "data")
    return P(*dims)
