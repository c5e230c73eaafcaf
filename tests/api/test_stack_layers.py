"""Parameters of equal layers, stacked for a scan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spmd
from spmd import P
from spmd.errors import TraceError


def layers(count: int = 3) -> list[dict[str, Any]]:
    return [{"weight": torch.randn(4, 4), "bias": (torch.randn(4),)} for _ in range(count)]


def test_plain_tensors() -> None:
    given = layers()
    stacked = spmd.stack_layers(given)
    assert torch.equal(stacked["weight"], torch.stack([layer["weight"] for layer in given]))
    assert torch.equal(stacked["bias"][0][2], given[2]["bias"][0])


def test_dtensors_keep_their_specs_behind_the_layers() -> None:
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    given = [spmd.distribute(layer, P("x"), mesh=mesh) for layer in layers()]
    assert spmd.stack_layers(given)["weight"].spec.pspec == P(None, "x")


def test_jit() -> None:
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")

    def run(x: torch.Tensor, given: list[dict[str, Any]]) -> torch.Tensor:
        body = lambda x, layer: (torch.tanh(x @ layer["weight"] + layer["bias"][0]), None)  # noqa: E731
        return spmd.scan(body, x, spmd.stack_layers(given))[0]

    x, given = torch.randn(6, 4), layers()
    torch.testing.assert_close(spmd.jit(run, (P("x"), P()), mesh=mesh)(x, given).full_tensor(), run(x, given))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "one layer or more"),
        ([{"w": torch.ones(2)}, {"v": torch.ones(2)}], "layer 1 has another structure"),
        ([{"w": torch.ones(2)}, {"w": torch.ones(3)}], r"\['w'\] of layer 1 is f32\[3\], and must be f32\[2\]"),
        ([{"w": 1.0}], "is float 1.0, and must be a tensor"),
    ],
)
def test_mistakes(given: list[Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        spmd.stack_layers(given)
