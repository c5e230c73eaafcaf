"""A jitted function, called as it is written on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.api.uncompiled.derivatives import whole_function
from spmd.api.values.arguments import check_argument, own_spec
from spmd.core.mesh import Mesh, Runtime
from spmd.core.pytree import flatten_with_paths, leaf_specs, tree_flatten
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.errors import MeshError, TraceError


def call_whole(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    name: str,
) -> Any:
    """Call a function of global tensors as it is written.

    Args:
        function: takes the tuple of arguments.
        args: its arguments, with plain tensors or DTensors for leaves; transforms may act on them.
        mesh: the mesh.
        in_specs, out_specs: those of `jit`.
        name: the function in messages.

    Returns:
        Its result, with DTensors by `out_specs`.

    Raises:
        MeshError, ShardingError, TraceError: as when it is compiled.
    """
    if mesh.runtime is Runtime.ABSTRACT:
        raise MeshError(f"{mesh} is abstract: nothing runs on it. Use make_mesh(..., runtime='virtual').")
    paths, leaves, tree = flatten_with_paths(args)
    given = leaf_specs(in_specs, args, mesh, what="in_specs", of="the arguments", optional=True)
    specs = [
        spec or own_spec(leaf, mesh, f"argument {path}") for leaf, spec, path in zip(leaves, given, paths, strict=True)
    ]
    for leaf, spec, path in zip(leaves, specs, paths, strict=True):
        check_argument(leaf, spec, f"argument {path}")
    out_trees: list[Any] = []

    def flat(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        result = function(tree.unflatten(tensors))
        _check_result(result, name)
        results, structure = tree_flatten(result)
        out_trees.append(structure)
        return results

    def placed(results: Sequence[torch.Tensor]) -> list[DTensorSpec]:
        metas = out_trees[-1].unflatten([TensorMeta.of(leaf) for leaf in results])
        given = leaf_specs(out_specs, metas, mesh, what="out_specs", item="result", of="the result", optional=True)
        return [spec or DTensorSpec.make(mesh, P(), TensorMeta.of(x)) for x, spec in zip(results, given, strict=True)]

    found = whole_function(flat, mesh, specs, placed)(leaves)
    return out_trees[-1].unflatten(found)


def _check_result(result: Any, name: str) -> None:
    for path, leaf in zip(*flatten_with_paths(result)[:2], strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise TraceError(
                f"Result {path} of {name} must be a tensor (got {type(leaf).__name__} {leaf!r:.60}). Return tensors "
                "only, or None for nothing."
            )
