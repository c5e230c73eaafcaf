"""The schema of the document of a plan, and the check of the references inside a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd.collectives.primitives import KINDS
from spmd.core.documents import Fields, Kind, ListOf, MapOf, Maybe, schema_violation

Document = dict[str, Any]
"""Plain data that `json` can write."""

_TEXTS = ListOf(str)

_STRATEGY = Fields({"label": str, "operands": _TEXTS, "results": _TEXTS})

_OPERATION: Mapping[str, Kind] = {
    "results": _TEXTS,
    "operator": str,
    "operands": _TEXTS,
    "at": str,
    "code": str,
    "seconds": float,
    "group": Maybe(int),
    "of": Maybe(int),
    "strategies": MapOf(_STRATEGY),
    "held": int,
}

_VALUE: Mapping[str, Kind] = {
    "meta": str,
    "spec": str,
    "atoms": ListOf(ListOf(int)),
    "dims": ListOf(_TEXTS),
    "partial": MapOf(str),
}

_COMM: Mapping[str, Kind] = {
    "kind": str,
    "axes": _TEXTS,
    "bytes": float,
    "seconds": float,
    "cause": str,
    "at": str,
    "operation": int,
    "suspicious": Maybe(Fields({"needed": float, "advice": str})),
}

_ALIKE: Mapping[str, Kind] = {
    "layers": ListOf(int),
    "compute": float,
    "communication": float,
    "bytes": float,
    "otherwise": str,
}

_LAYERS: Mapping[str, Kind] = {"at": str, "count": int, "operations": int, "alike": ListOf(Fields(_ALIKE))}

_LINK: Mapping[str, Kind] = {"axis": str, "kind": str, "latency": float, "bandwidth": float, "wait": float}

_MACHINE: Mapping[str, Kind] = {
    "flops": float,
    "memory_bandwidth": float,
    "link_bandwidth": float,
    "axis_bandwidth": MapOf(float),
    "latency": float,
    "axis_latency": MapOf(float),
    "dtype_flops": MapOf(float),
    "memory_capacity": Maybe(int),
    "operator_latency": float,
    "transcendental_seconds": float,
    "overlap": float,
    "memory_overlap": float,
    "write_allocate": bool,
    "fuses": bool,
    "links": ListOf(Fields(_LINK)),
    "origin": str,
}

_PLAN = Fields(
    {
        "format": int,
        "mesh": MapOf(int),
        "machine": Fields(_MACHINE),
        "seconds": float,
        "timing": Fields(dict.fromkeys(("step", "compute", "communication", "exposed"), float)),
        "gap": Maybe(float),
        "memory": MapOf(int),
        "peak_at": str,
        "program_hash": str,
        "inputs": MapOf(str),
        "keep_sharded": MapOf(_TEXTS),
        "reduce_dtype": Maybe(str),
        "outputs": _TEXTS,
        "program": _TEXTS,
        "arguments": _TEXTS,
        "constants": _TEXTS,
        "results": _TEXTS,
        "values": MapOf(Fields(_VALUE)),
        "operations": ListOf(Fields(_OPERATION)),
        "comms": ListOf(Fields(_COMM)),
        "layers": ListOf(Fields(_LAYERS)),
        "fallbacks": ListOf(int),
    }
)


def find_wrong(document: Any) -> str | None:
    """The first violation of the schema of plans in parsed JSON, in words; None if there is none."""
    return schema_violation(document, _PLAN) or _find_wrong_reference(document)


def _find_wrong_reference(document: Document) -> str | None:
    operations = len(document["operations"])
    if "peak" not in document["memory"]:
        return "['memory'] must have 'peak'"
    for number, comm in enumerate(document["comms"]):
        if comm["kind"] not in KINDS:
            return f"['comms'][{number}]['kind'] must be one of {', '.join(sorted(KINDS))} (got {comm['kind']!r:.80})"
        if comm["operation"] >= operations:
            return f"['comms'][{number}] is of operation {comm['operation']}, and there are {operations}"
    for number in document["fallbacks"]:
        if number >= operations:
            return f"['fallbacks'] has operation {number}, and there are {operations}"
    return None
