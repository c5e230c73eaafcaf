"""Specs as text, which operators take as arguments."""

from __future__ import annotations

from spmd.core.spec import P


def encode_spec(spec: P) -> str:
    """Encode a spec as text: the axes of a dim joined by `,`, dims by `|`, then `;` and the partial axes.

    >>> encode_spec(P("data", None, ("x", "y"), partial={"model": "sum"}))
    'data||x,y;model=sum'
    """
    dims = "|".join(",".join(axes) for axes in spec.dims)
    partial = ",".join(f"{axis}={op}" for axis, op in spec.partial)
    return f"{dims};{partial}" if partial else dims


def parse_spec(text: str) -> P:
    """Decode a spec from text; the inverse of `encode_spec`.

    >>> parse_spec("data||x,y;model=sum")
    P('data', None, ('x', 'y'), partial={'model': 'sum'})
    """
    dims, _, partial = text.partition(";")
    parts = [tuple(dim.split(",")) if dim else None for dim in dims.split("|")]
    return P(*parts, partial=dict(item.split("=") for item in partial.split(",")) if partial else None)  # type: ignore[arg-type]
