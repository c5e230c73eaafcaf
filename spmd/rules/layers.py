"""Layers of their own kind: bags of embeddings, distances of pairs, gradients of sampled grids."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

from spmd.rules.builders import nothing, rule
from spmd.rules.notation import factors, operand_names
from spmd.rules.partial import linear
from spmd.rules.rule import Call, Factors, Rule

aten = torch.ops.aten

_SUM, _MAX = 0, 2  # the modes of an embedding bag


def _bags(call: Call) -> Factors:
    """Columns of the table pass through; which rows go to which bag does not depend on them."""
    columns = {"weight": "_ d", "grad": "_ d", "maximum_indices": "_ d" if call.argument("mode") == _MAX else "_"}
    operands = [columns.get(name, "_") for name in operand_names(call)]
    results = ["_ d", "_", "_", columns["maximum_indices"]][: len(call.results)]
    return _fitted(call, operands, results)


def _bag_weights(call: Call) -> Factors:
    found = _fitted(call, ["_ d", "_ d", "_", "_", "_"], ["_"])
    return attrs.evolve(found, reduce={"d": "sum"})


def _fitted(call: Call, operands: list[str], results: list[str]) -> Factors:
    terms = [tuple(() if word == "_" else (word,) for word in term.split()) for term in (*operands, *results)]
    count, size = len(operands), call.operands[0].shape[-1]
    return Factors(tuple(terms[:count]), tuple(terms[count:]), {"d": size}, independent=frozenset("d"))


def _bag_rows(call: Call) -> Any:
    """Sums and means are linear in the table, sums in the samples' weights too."""
    mode = call.argument("mode")
    yield from linear("weight:0")(call) if mode != _MAX else ()
    yield from linear("per_sample_weights:0")(call) if mode == _SUM else ()


def _grid_gradients(call: Call) -> Factors:
    """Of the image, a sum over the grid, and of the grid, a sum over channels."""
    space = call.operands[1].ndim - 2
    grid, image = " ".join("dhw"[-space:]), f"n c{' _' * space}"
    asked = [term for term, wanted in zip((image, f"n {grid} _"), call.argument("output_mask"), strict=False) if wanted]
    pattern = f"n c {grid}, {image}, n {grid} _ -> {', '.join(asked)}"
    return factors(pattern, sum=f"c {grid}").factorize(call)


def _no_grid(_: tuple[str, ...], call: Call, *args: Any) -> Any:
    """Zeros: torch's kernel refuses images without channels."""
    made = iter(nothing((), call, *args))
    return tuple(next(made) if wanted else None for wanted in call.argument("output_mask"))


_GRID = rule(_grid_gradients, linear("grad_output"), empty=_no_grid)

LAYERS: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten._embedding_bag.default: rule(_bags, _bag_rows),
        aten._embedding_bag_forward_only.default: rule(_bags, _bag_rows),
        aten._embedding_bag_backward.default: rule(_bags, linear("grad")),
        aten._embedding_bag_dense_backward.default: rule(_bags, linear("grad")),
        aten._embedding_bag_per_sample_weights_backward.default: rule(_bag_weights, linear("grad", "weight")),
        aten._pdist_forward.default: factors("_ _ -> _"),
        aten._pdist_backward.default: factors("_, _ d, _ -> _ d", linear("grad")),
        aten.grid_sampler_2d_backward.default: _GRID,
        aten.grid_sampler_3d_backward.default: _GRID,
    }
)
