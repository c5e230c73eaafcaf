"""The comparison of redistributions with an optimum and with torch, on some pairs of specs."""

from collections import Counter

import pytest
import torch

from proofs.redistribution.optimum import MOST, optima
from proofs.redistribution.sweep import compare, form
from spmd.core.mesh import make_mesh
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.testing.specs import every_spec

MESH = make_mesh({"x": 2, "y": 2}, runtime="virtual")


def spec(value: P) -> DTensorSpec:
    return DTensorSpec.make(MESH, value, TensorMeta((16, 8), torch.float32))


@pytest.mark.parametrize("shape", [(16, 8), (4096, 1024)], ids=str)
def test_no_redistribution_is_above_the_optimum_or_worse_than_torchs(shape: tuple[int, ...]) -> None:
    found = compare(MESH, TensorMeta(shape, torch.float32), every=6)
    assert 125 == found.pairs
    assert (0, 0, 0) == (found.above.total(), found.dominated, found.against["price", 1])


def test_the_optimum_counts_collectives() -> None:
    specs = every_spec(MESH, TensorMeta((16, 8), torch.float32), reductions=("sum",))
    least = optima(specs, eager=False)
    row, column = specs.index(spec(P(partial={"y": "sum"}))), specs.index(spec(P(("y", "x"))))
    assert [float("inf"), 256.0, *[192.0] * (MOST - 1)] == least[row, column].tolist()


def test_the_form_of_a_pair_is_that_of_renamed_pairs() -> None:
    pairs = [
        (P("x", partial={"y": "sum"}), P(None, "y")),
        (P("y", partial={"x": "max"}), P(None, "x")),
        (P(None, "x", partial={"y": "max"}), P("y")),
        (P("x", partial={"y": "sum"}), P("y")),
    ]
    forms = [form(spec(source), spec(target)) for source, target in pairs]
    assert [3, 1] == [count for _, count in Counter(forms).most_common()]
