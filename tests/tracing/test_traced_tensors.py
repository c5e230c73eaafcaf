"""Traced tensors have no values: what they show, and what the errors say where values are needed."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spmd
from spmd import TraceError

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")


def shown(function: Callable[[torch.Tensor], Any]) -> list[str]:
    """The repr, the str and an f-string of what a function computes inside of jit."""
    texts = []

    def step(x: torch.Tensor) -> torch.Tensor:
        y = function(x)
        texts.extend([repr(y), str(y), f"{y}", f"{[y]}"[1:-1]])
        return x

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))
    return texts


def test_they_show_shape_dtype_name_and_hint() -> None:
    assert ["Traced(f32[8,4] x; spmd.debug.print shows its values)"] * 4 == shown(lambda x: x)
    assert ["Traced(f64[] sum; spmd.debug.print shows its values)"] * 4 == shown(lambda x: x.double().sum())


def test_they_show_it_under_transforms() -> None:
    texts = []

    def loss(row: torch.Tensor) -> torch.Tensor:
        texts.append(str(row))
        return row.sum()

    spmd.jit(torch.func.vmap(torch.func.grad(loss)), mesh=MESH)(torch.ones(8, 4))
    assert ["Traced(f32[4] row; spmd.debug.print shows its values)"] == texts


READS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), r"\.item\(\) at"),
    "int": (lambda x: int(x.sum()), r"int\(\) at"),
    "many as a number": (lambda x: float(x), r"float\(\) or math at"),
    "complex": (lambda x: complex(x.sum()), r"complex\(\) at"),
    "index": (lambda x: [1, 2][x.sum().long()], r"index of a list at"),
    "range": (lambda x: range(x.sum().long()), r"range\(\), .* at"),
    "bool": (lambda x: bool(x.sum()), r"torch\.where"),
    "many as a bool": (lambda x: x in [x + 1], r"torch\.where"),
    "format": (lambda x: f"{x.sum():.2f}", r"A format .*spmd\.debug\.print"),
    "tolist": (lambda x: x.tolist(), r"\.tolist\(\) at"),
    "numpy": (lambda x: x.numpy(), r"\.numpy\(\) at"),
    "function of numpy": (lambda x: np.sin(x), r"A function of numpy at"),
    "pickle": (lambda x: pickle.dumps(x), r"Pickling or saving at"),
    "save": (lambda x: torch.save({"x": x}, io.BytesIO()), r"Pickling or saving at"),
    "assert_close": (lambda x: torch.testing.assert_close(x, x), r"torch\.testing at .*compare the results"),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("transform", [lambda f: f, torch.func.grad], ids=["plain", "grad"])
def test_values_that_are_needed_inside(name: str, transform: Any) -> None:
    read, message = READS[name]

    def step(x: torch.Tensor) -> torch.Tensor:
        read(x)
        return x.sum()

    if name in ("pickle", "save") and transform is torch.func.grad:
        pytest.skip("torch reads the memory of a tensor under a transform before it asks anyone")
    with pytest.raises(TraceError, match=r"(?s)at test_traced_tensors\.py:\d+.*needs the values of") as caught:
        spmd.jit(transform(step), mesh=MESH)(torch.ones(8, 4))
    assert re.search(message, str(caught.value), re.DOTALL)


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: read for name, (read, _) in READS.items()},
    "add": lambda x: x + 1,
    "conversion": lambda x: x.to(torch.float64),
    "other device": lambda x: x.cpu(),
    "safetensors": lambda x: spmd.save_safetensors({"x": x}, "no-such-folder"),
    "operand": lambda x: torch.ones(8, 4) + x,
    "backward": lambda x: x.sum().backward(),
    "deepcopy": lambda x: copy.deepcopy(x),
    "distribute": lambda x: spmd.distribute(x, spmd.P("data"), MESH),
    "other trace": lambda x: spmd.jit(lambda y: y + x, mesh=MESH)(torch.ones(8, 4)),
}


@pytest.mark.filterwarnings("ignore:A traced tensor, which has no value, was put into kept")
@pytest.mark.parametrize("name", USES)
def test_leaked_ones(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    kept = []

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))
    assert "Traced(f32[8,4] mul; its trace has ended: return it from the function)" == str(kept[0])
    assert (8, 4) == kept[0].shape
    message = r"Tensor mul f32\[8,4\], computed at test_traced_tensors\.py:\d+ .*Return it from the function"
    other = r"f32\[8,4\] of another trace was used at test_traced_tensors\.py:\d+"
    with pytest.raises(TraceError, match=other if name == "other trace" else message):
        USES[name](kept[0])
