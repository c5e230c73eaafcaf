"""Specs by path: the first pattern that matches a tensor's path says how it is sharded."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar, overload

import torch
from torch import nn

from spmd.api.model_specs.leaves import Choice, Leaf, Show, check_spec, leaves_of, table
from spmd.core.mesh import Mesh, check_mesh
from spmd.core.pytree import SpecLike, is_spec
from spmd.core.spec import P, TensorMeta
from spmd.errors import ShardingError
from spmd.job.tracebacks import hides_internals

_SHOWN = 8  # paths in a message


_Key = TypeVar("_Key")


@overload
def specs(
    tree_or_module: nn.Module,
    patterns: Mapping[str, P],
    default: P = ...,
    *,
    mesh: Mesh | None = None,
    show: Show | None = None,
) -> dict[str, P]: ...


@overload
def specs(
    tree_or_module: Mapping[_Key, torch.Tensor | TensorMeta],
    patterns: Mapping[str, P],
    default: P = ...,
    *,
    mesh: Mesh | None = None,
    show: Show | None = None,
) -> dict[_Key, P]: ...


@overload
def specs(
    tree_or_module: object,
    patterns: Mapping[str, SpecLike],
    default: SpecLike = ...,
    *,
    mesh: Mesh | None = None,
    show: Show | None = None,
) -> object: ...


@hides_internals
def specs(
    tree_or_module: Any,
    patterns: Mapping[str, SpecLike],
    default: SpecLike = P(),
    *,
    mesh: Mesh | None = None,
    show: Show | None = None,
) -> Any:
    """Specs for a tree of tensors by the tensors' paths, as with the partitioning rules of flax.

    A path joins keys, fields and positions by dots: `"layers.0.q_proj.weight"`. A pattern is one of `fnmatch`, for the
    whole path; `*` matches dots, too. The first pattern that matches a path counts, so the special ones stand first. A
    tied tensor of a module is matched by each of its names.

    The specs of a module are those of its state, with which `torch.func.functional_call` calls it:

        state = dict(model.named_parameters()) | dict(model.named_buffers())
        layout = spmd.specs(model, {"*.q_proj.weight": P("model")})
        state = spmd.distribute(state, layout, mesh)
        forward = spmd.jit(lambda state, x: functional_call(model, state, x), (layout, P()), P(), mesh=mesh)

    Args:
        tree_or_module: a pytree of tensors (or of what has their shapes and dtypes), or a module.
        patterns: the specs by pattern.
        default: the spec of tensors whose paths no pattern matches.
        mesh: the mesh, if specs are to be checked against its axes. Uneven shards are allowed.
        show: is called with a table of what matched: `print`.

    Returns:
        A tree of the same structure with specs for leaves; for a module, a dict by the names of its parameters and
        buffers.

    Raises:
        ShardingError: a pattern without effect, because it matches nothing or because earlier ones match all that it
            does; a spec that does not fit its tensor; a leaf that is not a tensor.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    >>> specs(model, {"0.*": P("model"), "*.weight": P(None, "model")}, show=print)
    path      tensor    spec              pattern
    0.bias    f32[8]    P('model')        0.*
    0.weight  f32[8,4]  P('model')        0.*
    1.bias    f32[4]    P()               (default)
    1.weight  f32[4,8]  P(None, 'model')  *.weight
    4 tensors, 304 B
    {'0.weight': P('model'), '0.bias': P('model'), '1.weight': P(None, 'model'), '1.bias': P()}
    """
    if mesh is not None:
        check_mesh(mesh)
    _check_patterns(patterns, default)
    leaves, structure = leaves_of(tree_or_module)
    first = [next((pattern for pattern in patterns if _matches(leaf, pattern)), None) for leaf in leaves]
    _check_effects(patterns, first, leaves)
    choices = [
        Choice(leaf, check_spec(default if pattern is None else patterns[pattern], leaf, mesh), pattern or "(default)")
        for leaf, pattern in zip(leaves, first, strict=True)
    ]
    if show is not None:
        show(table(choices, mesh, "pattern"))
    return structure.unflatten([choice.spec for choice in choices])


def _check_patterns(patterns: Mapping[str, SpecLike], default: SpecLike) -> None:
    if not isinstance(patterns, Mapping):
        raise ShardingError(
            f"patterns must map paths to specs, as {{'*.weight': P('model')}} (got {type(patterns).__name__})."
        )
    for pattern, spec in [*patterns.items(), ("default", default)]:
        if not isinstance(pattern, str):
            raise ShardingError(f"A pattern must be text such as '*.weight' (got {pattern!r}).")
        if not is_spec(spec):
            raise ShardingError(
                f"The spec of {pattern!r} must be a P or a tuple of placements, one a mesh axis (got {spec!r:.60})."
            )


def _check_effects(patterns: Mapping[str, SpecLike], first: Sequence[str | None], leaves: Sequence[Leaf]) -> None:
    """Raise a ShardingError for a pattern by which no leaf gets its spec."""
    paths = [name for leaf in leaves for name in (leaf.path, *leaf.tied)]
    for pattern in patterns:
        if pattern in first:
            continue
        matched = [number for number, leaf in enumerate(leaves) if _matches(leaf, pattern)]
        if matched:
            earlier = ", ".join(dict.fromkeys(repr(first[number]) for number in matched))
            raise ShardingError(
                f"Pattern {pattern!r} has no effect: earlier patterns match all {len(matched)} paths that it matches "
                f"({earlier}). The first pattern that matches counts: put {pattern!r} before them, or leave it out."
            )
        raise ShardingError(
            f"Pattern {pattern!r} matches none of the {len(paths)} paths of the tree.{_nearest(pattern, paths)} "
            f"Paths: {_listed(paths)}. Patterns are those of fnmatch, for a whole path: '*.weight'."
        )


def _matches(leaf: Leaf, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (leaf.path, *leaf.tied))


def _nearest(pattern: str, paths: Sequence[str]) -> str:
    plain = pattern.strip("*.")
    found = difflib.get_close_matches(pattern, paths, n=3) or [
        path for path in paths if difflib.get_close_matches(plain, [path, *path.split(".")], n=1, cutoff=0.7)
    ]
    return f" Nearest: {_listed(found[:3])}." if found else ""


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(map(repr, paths[:_SHOWN]))
    return shown + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "") if paths else "none"
