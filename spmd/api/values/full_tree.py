"""From a tree of DTensors to one of plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

import torch

from spmd.api.values.dtensor import DTensor, assemble
from spmd.collectives.distributed.agreement import check_agreement, spans_processes
from spmd.core.pytree import flatten_with_paths

_Key = TypeVar("_Key")
_Tree = TypeVar("_Tree")


@overload
def full_tree(tree: torch.Tensor) -> torch.Tensor: ...


@overload
def full_tree(tree: Mapping[_Key, torch.Tensor]) -> dict[_Key, torch.Tensor]: ...


@overload
def full_tree(tree: _Tree) -> _Tree: ...


def full_tree(tree: Any) -> Any:
    """The pytree with the global tensor in place of each DTensor; all other leaves are the same objects.

    On a distributed mesh this is a collective call, and all ranks get the tensors. One small collective for each mesh
    compares the DTensors of its ranks, in place of one for each `full_tensor()`. Gradients flow through, as there.
    A rank whose tree has no DTensor of a mesh does not wait for that mesh's other ranks: they wait for it until the
    timeout (`init(timeout=...)`), and their error says where it is.

    Args:
        tree: a pytree; its DTensors may be on several meshes.

    Raises:
        DivergenceError: ranks with DTensors at different paths, or of different specs; or ranks make different calls.
        SpmdError: a rank failed, or never makes the call.

    >>> from spmd import P, distribute, make_mesh
    >>> import torch
    >>> placed = distribute({"w": torch.arange(3)}, P("data"), make_mesh({"data": 2}, runtime="virtual"))
    >>> full_tree({**placed, "step": 7})
    {'w': tensor([0, 1, 2]), 'step': 7}
    """
    paths, leaves, structure = flatten_with_paths(tree)
    held = {path: leaf for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, DTensor)}
    for mesh in dict.fromkeys(leaf.mesh for leaf in held.values() if spans_processes(leaf.mesh)):
        claims = {f"leaf {path}".rstrip(): str(leaf.spec) for path, leaf in held.items() if leaf.mesh == mesh}
        call = f"full_tree on {mesh}"
        check_agreement(call, claims, "Every rank must assemble the same DTensors.", mesh.ranks)
    return structure.unflatten([assemble(leaf, agreed=True) if isinstance(leaf, DTensor) else leaf for leaf in leaves])
