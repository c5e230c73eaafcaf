"""A jitted function, called as it is written on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from spmd.api.transforms.transformed import call, is_transformed
from spmd.api.uncompiled.whole_function import WholeFunction
from spmd.api.values.arguments import check_argument, own_spec
from spmd.api.values.leaves import as_argument, key_of
from spmd.core.mesh import Mesh, Runtime
from spmd.core.pytree import flatten_with_paths, leaf_specs, tree_flatten
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.core.value_types import CONSTANTS
from spmd.errors import MeshError, TraceError

OutSpecs: TypeAlias = Callable[[Any, Sequence[DTensorSpec | None]], Sequence[DTensorSpec | None]]
"""From a result, and the spec of each leaf of the arguments, to the spec of each leaf of the result, or None."""


def call_whole(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: Mesh,
    in_specs: Any,
    out_specs: OutSpecs,
    name: str,
) -> Any:
    """Call a function of global tensors as it is written.

    Args:
        function: takes the tuple of arguments.
        args: its arguments, with plain tensors or DTensors for leaves; transforms may act on them.
        mesh: the mesh.
        in_specs: that of `jit`.
        out_specs: the specs of the leaves of the result.
        name: the function in messages.

    Returns:
        Its result, with DTensors by `out_specs`.

    Raises:
        MeshError, ShardingError, TraceError: as when it is compiled.
    """
    if mesh.runtime is Runtime.ABSTRACT:
        raise MeshError(f"{mesh} is abstract: nothing runs on it. Use make_mesh(..., runtime='virtual').")
    paths, leaves, tree = flatten_with_paths(args)
    leaves = list(map(as_argument, leaves))
    args = tree.unflatten(leaves)
    found = leaf_specs(in_specs, args, mesh, what="in_specs", of="the arguments", optional=True, only_tensors=True)
    given = [(n, leaf, spec) for n, (leaf, spec) in enumerate(zip(leaves, found, strict=True)) if key_of(leaf) is None]
    specs = [spec or own_spec(leaf, mesh, f"argument {paths[n]}") for n, leaf, spec in given]
    by_leaf: list[DTensorSpec | None] = [None] * len(leaves)
    for (n, leaf, _), spec in zip(given, specs, strict=True):
        by_leaf[n] = spec
        check_argument(leaf, spec, f"argument {paths[n]}")
    results: list[Any] = []  # the leaves of the last result, and its structure

    def flat(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        for (n, _, _), tensor in zip(given, tensors, strict=True):
            leaves[n] = tensor
        result = function(tree.unflatten(leaves))
        _check_result(result, name)
        results[:] = tree_flatten(result)
        return [leaf for leaf in results[0] if isinstance(leaf, torch.Tensor)]

    def placed(tensors: Sequence[torch.Tensor]) -> list[DTensorSpec]:
        given = out_specs(results[1].unflatten(results[0]), by_leaf)
        held = [spec for spec, leaf in zip(given, results[0], strict=True) if isinstance(leaf, torch.Tensor)]
        return [spec or DTensorSpec.make(mesh, P(), TensorMeta.of(x)) for x, spec in zip(tensors, held, strict=True)]

    whole, tensors = (
        WholeFunction(flat, mesh, [spec.complete.pspec for spec in specs], placed),
        [x for _, x, _ in given],
    )
    wrapped = iter(call(whole, tensors) if is_transformed(tensors) else whole.run(tensors))
    every, structure = results
    return structure.unflatten([next(wrapped) if isinstance(leaf, torch.Tensor) else leaf for leaf in every])


def _check_result(result: Any, name: str) -> None:
    for path, leaf in zip(*flatten_with_paths(result)[:2], strict=True):
        if not isinstance(leaf, (torch.Tensor, *CONSTANTS)):
            raise TraceError(
                f"Result {path} of {name} must be a tensor or a number (got {type(leaf).__name__} {leaf!r:.60}). "
                "Return tensors, numbers or text, or None for nothing."
            )
