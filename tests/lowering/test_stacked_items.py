"""Copies of what trips leave of larger tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import spmd
from spmd import P
from spmd.core.own_storage import own_memory


def test_a_stack_holds_no_more_than_its_items():
    """Views of parts of larger tensors are copied; views of whole ones, and what the loop holds anyway, are not."""

    def trip(x: torch.Tensor, w: torch.Tensor) -> Any:
        large, small = torch.tanh(x @ w), torch.sin(x)
        return large.mT, (large[:, :2], small.mT, w[0])

    x, w = torch.randn(8, 8), torch.randn(3, 8, 8)
    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    jitted = spmd.jit(lambda x, w: spmd.scan(trip, x, w), P(), P(), mesh=mesh)
    copies = [each for each in jitted.lower(x, w).graph().operations if each.op is own_memory]
    assert [(8, 2)] == [operation.tensors[0].meta.shape for operation in copies]
    found, wanted = jitted(x, w), spmd.scan(trip, x, w)
    for result, expected in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(result.full_tensor(), expected)
