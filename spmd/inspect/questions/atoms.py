"""The notation of atoms, the parts that a planner splits dims into: in words, and as code that asks for the same.

`P((16·128@model))` is a dim of 16 x 128 whose second part is sharded over `model`, as a dim of batches times positions
is where positions are sharded. No `P` of the flattened dim says so; a constraint of the dim taken apart does.
"""

from __future__ import annotations

from spmd.core.spec import P
from spmd.plan.data.layout import Layout
from spmd.rules.strategy import LogicalShape


def has_atoms(layout: Layout) -> bool:
    """Whether the text of a layout has the notation of atoms."""
    return "·" in str(layout)


def atom_text(atoms: LogicalShape, position: int) -> str:
    """A logical dim in words.

    Args:
        atoms: the sizes of the atoms of every dim.
        position: the number of the logical dim.

    >>> atom_text(((16, 128), (64,)), 1), atom_text(((16, 128), (64,)), 2)
    ('the 128 of dim 0 (16·128)', 'dim 1')
    """
    for dim, group in enumerate(atoms):
        if position < len(group):
            return f"dim {dim}" if len(group) == 1 else f"the {group[position]} of dim {dim} ({_product(group)})"
        position -= len(group)
    raise IndexError(f"no logical dim {position} in {atoms}")


def typed(name: str, layout: Layout) -> str:
    """Code that constrains a value to a layout: dims that are sharded inside are taken apart and put together.

    >>> import torch
    >>> from spmd.core.mesh import make_mesh
    >>> from spmd.core.spec import DTensorSpec, TensorMeta
    >>> mesh, meta = make_mesh({"x": 2}, runtime="abstract"), TensorMeta((16, 128, 64), torch.float32)
    >>> typed("y", Layout(DTensorSpec.make(mesh, P(None, "x"), meta), ((16, 128), (64,))))
    "spmd.constrain(y.unflatten(0, (16, 128)), P(None, 'x')).flatten(0, 1)"
    """
    axes = iter(layout.spec.dims)
    dims: list[tuple[str, ...]] = []
    before, after = "", ""
    for group in layout.atoms:
        parts = [(size, found) for size, found in ((size, next(axes)) for size in group) if size != 1 or found]
        if any(found for _, found in parts[1:]):
            sizes, first = tuple(size for size, _ in parts), len(dims)
            before += f".unflatten({first}, {sizes})"
            after = f".flatten({first}, {first + len(sizes) - 1}){after}"
            dims += [found for _, found in parts]
        else:
            dims.append(parts[0][1] if parts else ())
    return f"spmd.constrain({name}{before}, {P(*dims, partial=dict(layout.spec.partial))!r}){after}"


def _product(sizes: tuple[int, ...]) -> str:
    return "·".join(map(str, sizes))
