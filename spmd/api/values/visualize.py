"""`visualize`: which rank holds which block, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmd.api.values.dtensor import DTensor
from spmd.core.mesh import Mesh, current_mesh
from spmd.core.pictures.picture import Picture
from spmd.core.pytree import SpecLike, is_spec, make_spec
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import ShardingError
from spmd.job.tracebacks import hides_internals


@hides_internals
def visualize(
    what: DTensor | DTensorSpec | Mesh | SpecLike, *, shape: Sequence[int] | None = None, mesh: Mesh | None = None
) -> Picture:
    """A picture of which rank holds which block of a tensor, or of where the ranks of a mesh are.

    It shows itself: as text where it is printed or ends a line of the interpreter, as SVG in a notebook, in colour on a
    rich console (`rich.print`, which needs the extra `report`); `.save("picture.svg")` writes a file. Rows and columns
    are the dims that are split, with a panel for each index of further ones; of many, some are left out. Nothing is
    communicated and no value is read, so that every rank may ask alone. DTensors, specs and meshes show the same
    picture where they end a notebook's cell.

    Modelled on `jax.debug.visualize_array_sharding`, which prints.

    Args:
        what: a DTensor, a DTensorSpec, a mesh; or a `P` or placements, with the shape of the tensor.
        shape: the global shape of a tensor with the spec `what`.
        mesh: its mesh; by default that of `use_mesh`.

    Raises:
        ShardingError: `what` has no sharding, or a spec does not fit the shape and the mesh.
        MeshError: no mesh for a spec.

    >>> from spmd import P, make_mesh
    >>> print(visualize(P("data", "model"), shape=(5, 4), mesh=make_mesh({"data": 2, "model": 2}, runtime="virtual")))
    f32[5,4] P('data', 'model') on Mesh(data=2, model=2)
    rows: dim 0 (5) by data
    columns: dim 1 (4) by model
          0:2   2:4
        ┌─────┬─────┐
    0:3 │  0  │  1  │
        ├─────┼─────┤
    3:5 │  2  │  3  │
        └─────┴─────┘
    """
    if isinstance(what, DTensor):
        return what.spec.picture
    if isinstance(what, (DTensorSpec, Mesh)):
        return what.picture
    if is_spec(what) and shape is not None:
        where = current_mesh(mesh)
        return make_spec(where, what, TensorMeta(shape, torch.float32), where="the tensor").picture
    raise ShardingError(f"visualize takes a DTensor, a DTensorSpec or a mesh (got {_text(what)}). {_remedy(what)}")


def _text(what: Any) -> str:
    return f"{what!r} without a shape" if is_spec(what) else f"a {type(what).__name__}"


def _remedy(what: Any) -> str:
    if is_spec(what):
        return "Give the tensor's shape: visualize(P('data'), shape=(8, 4), mesh=mesh)."
    return "Place a tensor first: spmd.distribute(x, P('data'), mesh)."
