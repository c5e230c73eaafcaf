"""`full_tree`, on virtual ranks and on processes."""

from __future__ import annotations

import specs_cases
import torch
from conftest import OnRanks
from workers import Workers, call_on_mesh

import spmd
from spmd import P


def test_dtensors_are_assembled_and_other_leaves_stay(on_ranks: OnRanks) -> None:
    on_ranks(specs_cases.assembled, {"data": 2})


def test_ranks_compare_once(workers: Workers) -> None:
    seen = workers.run(call_on_mesh, specs_cases.compared_once, {"data": 2}, "distributed", ranks=2)
    assert [["full_tree on Mesh(data=2)"]] * 2 == seen


def test_different_trees_are_an_error_on_every_rank(workers: Workers) -> None:
    first, second = workers.run(call_on_mesh, specs_cases.different_trees, {"data": 2}, "distributed", ranks=2)
    assert first == second
    assert "leaf 'w'" in first.replace("['w']", "'w'") and "Every rank must assemble the same DTensors" in first


def test_gradients_flow_through() -> None:
    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    x = spmd.distribute(torch.arange(3.0), P("data"), mesh).requires_grad_()
    spmd.full_tree([x])[0].square().sum().backward()
    assert [0.0, 2.0, 4.0] == x.grad.full_tensor().tolist()  # type: ignore[union-attr]
