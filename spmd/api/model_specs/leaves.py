"""The tensors of a model with dotted paths, and the specs that are chosen for them, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import attrs
import optree
import torch

from spmd.core.argument_paths import dotted_path
from spmd.core.mesh import Mesh
from spmd.core.modules import tied_names
from spmd.core.pytree import NAMESPACE, SpecLike, leaf_meta, make_spec
from spmd.core.quantity import size_text
from spmd.core.spec import P, TensorMeta
from spmd.errors import ShardingError

Show: TypeAlias = Callable[[str], object]
"""What is called with the table of chosen specs: `print`, or a logger's `info`."""


@attrs.frozen
class Leaf:
    """A tensor of a model: its path, its meta, its other names if it is tied, and how messages call it."""

    path: str
    meta: TensorMeta
    tied: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """How messages call it."""
        return f"leaf {self.path!r}"


@attrs.frozen
class Choice:
    """The spec of a leaf, and why it has it."""

    leaf: Leaf
    spec: SpecLike
    reason: str


def model_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and the buffers of a module, each tensor once, as `torch.func.functional_call` takes them."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def leaves_of(tree: Any) -> tuple[list[Leaf], optree.PyTreeSpec]:
    """The tensors of a pytree or a module in optree's order, with dotted paths, and the structure of the tree.

    Raises:
        ShardingError: a leaf that is not a tensor.

    >>> [leaf.path for leaf in leaves_of({"layers": [{"w": torch.zeros(2)}]})[0]]
    ['layers.0.w']
    """
    tied: dict[str, str] = {}
    if isinstance(tree, torch.nn.Module):
        tied, tree = tied_names(tree), model_state(tree)
    accessors, values, structure = optree.tree_flatten_with_accessor(tree, namespace=NAMESPACE)
    leaves = []
    for path, value in zip(map(dotted_path, accessors), values, strict=True):
        others = tuple(name for name, first in tied.items() if first == path)
        leaves.append(Leaf(path, leaf_meta(value, f"leaf {path!r}"), others))
    return leaves, structure


def check_spec(spec: SpecLike, leaf: Leaf, mesh: Mesh | None) -> SpecLike:
    """Return a spec that fits its leaf; without a mesh, only the number of dims is checked.

    Raises:
        ShardingError: the spec does not fit.
    """
    if mesh is not None:
        make_spec(mesh, spec, leaf.meta, where=leaf.where)
    elif isinstance(spec, P) and len(spec.dims) > leaf.meta.ndim:
        raise ShardingError(
            f"{leaf.where} {leaf.meta}: {spec!r} names {len(spec.dims)} dims but the tensor has {leaf.meta.ndim}. "
            "Shorten the spec to the tensor's dims."
        )
    return spec


def table(choices: Iterable[Choice], mesh: Mesh | None, reason: str) -> str:
    """The specs as text, a line for each leaf; with a mesh, the bytes that a rank holds of all of them.

    Args:
        choices: the specs.
        mesh: the mesh, if it is known.
        reason: the heading of the column of reasons.
    """
    choices = list(choices)
    rows = [("path", "tensor", "spec", reason)]
    rows += [(choice.leaf.path, str(choice.leaf.meta), repr(choice.spec), choice.reason) for choice in choices]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    whole = sum(choice.leaf.meta.nbytes for choice in choices)
    total = f"{len(choices)} tensors, {size_text(whole)}"
    if mesh is not None:
        held = [make_spec(mesh, choice.spec, choice.leaf.meta, where=choice.leaf.where) for choice in choices]
        total += f", of which a rank holds {size_text(sum(spec.local_bytes() for spec in held))}"
    return "\n".join([*lines, total])
