"""The mutants of loops and branches: each changes what one function with a loop or a branch computes, or fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop_cases import PLACES, arguments, branch, branch_in_loop, reverse, rnn
from torch import Tensor
from torch.utils._pytree import tree_leaves

import spmd
from proofs.fuzz.mutants import MUTANTS, loops

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.func.grad(lambda *args: sum(x.sin().sum() for x in tree_leaves(function(*args))), (0, 1, 2))


def draws(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.scan(lambda c, x: (c * x, torch.rand(c.shape, dtype=c.dtype)), h, xs)


CASES: dict[str, Callable[..., Any]] = {
    "tie: next": gradient(reverse),
    "tie: merge": gradient(branch),
    "moved: draws": draws,
    "transpose: carries of a loop": gradient(rnn),
    "transpose: order of trips": gradient(branch_in_loop),
    "transpose: sums of a loop": gradient(rnn),
    "stack: order of trips": rnn,
}


def check(function: Callable[..., Any]) -> None:
    """Compare a function inside of jit with itself on one device."""
    args, step = arguments(0), spmd.jit(function, PLACES[0][2], mesh=MESH)
    torch.manual_seed(0)
    found = tree_leaves(step(*args))
    torch.manual_seed(0)
    for x, y in zip(found, tree_leaves(function(*args)), strict=True):
        torch.testing.assert_close(x.full_tensor(), y)


@pytest.mark.parametrize("name", [mutant.name for mutant in loops.MUTANTS])
def test_a_mutant_of_loops_is_found(name: str) -> None:
    check(CASES[name])
    with MUTANTS[name].applied(), pytest.raises(Exception):  # noqa: B017  # wrong values, or any error
        check(CASES[name])
