"""Edits of the documents of saved plans, from crude to cunning: what a person, a tool or a bad disk does to a file."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from spmd.errors import SpmdError
from spmd.mesh import Mesh
from spmd.plan.layout import Layout
from spmd.spec import DTensorSpec, TensorMeta

Document = dict[str, Any]
Edit = Callable[[Document, random.Random], None]

OTHERS = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    7,
    2**31,
    2**63,
    10**30,
    1.5,
    1e999,
    float("nan"),
    "",
    "x",
    "data",
    [],
    {},
    [[]],
]
"""What may stand in place of anything."""

BROKEN = (LookupError, TypeError, ValueError, AttributeError, SpmdError)
"""What comes of a second edit, or of a description, where the first edit has left no plan."""

TEXTS = [
    "Replicate()",
    "Shard(0)",
    "Shard(1)",
    "Shard(-1)",
    "Partial('sum')",
    "Partial('max')",
    "i",
    "replicate",
    "data",
]


def edit(document: Document, mesh: Mesh, draw: random.Random) -> Document:
    """A document with one thing changed, or two; most with the descriptions of values put right."""
    changed = document
    while changed == document:
        changed = _edited(changed, draw)
        if draw.random() < 0.2:
            with suppress(*BROKEN):
                changed = _edited(changed, draw)
        if draw.random() < 0.8:
            describe(changed, mesh)
    return changed


def _edited(document: Document, draw: random.Random) -> Document:
    document = copy.deepcopy(document)
    draw.choice(EDITS)(document, draw)
    return document


def describe(document: Document, mesh: Mesh) -> None:
    """Make the descriptions of values those of their atoms and specs, as far as there are such."""
    with suppress(*BROKEN):
        for entry in document["values"].values():
            with suppress(*BROKEN):
                atoms, dims = (tuple(map(tuple, entry[key])) for key in ("atoms", "dims"))
                meta = TensorMeta([size for group in atoms for size in group], torch.float32)
                entry["spec"] = str(Layout(DTensorSpec(mesh, dims, entry["partial"], meta), atoms))


def places(item: Any) -> Iterator[tuple[Any, Any]]:
    """Everything in a document, as containers and keys."""
    for key in list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ():
        yield item, key
        yield from places(item[key])


def any_place(document: Document, draw: random.Random) -> tuple[Any, Any]:
    """Something in a document; the parts that decide what is computed come up more often than the others."""
    key = draw.choice(["values", "operations"] * 4 + list(document))
    return draw.choice([(document, key), *places(document[key])])


def drop(document: Document, draw: random.Random) -> None:
    container, key = any_place(document, draw)
    del container[key]


def replace(document: Document, draw: random.Random) -> None:
    container, key = any_place(document, draw)
    container[key] = copy.deepcopy(draw.choice(OTHERS))


def add(document: Document, draw: random.Random) -> None:
    container, key = any_place(document, draw)
    if isinstance(container, dict):
        container["x"] = copy.deepcopy(container[key])
    else:
        container.insert(draw.randrange(len(container) + 1), copy.deepcopy(container[key]))


def retype(document: Document, draw: random.Random) -> None:
    container, key = any_place(document, draw)
    item = container[key]
    container[key] = draw.choice([str(item), [item], {"x": item}, float(item) if isinstance(item, int) else None])


def change_number(document: Document, draw: random.Random) -> None:
    found = [(c, k) for c, k in places(document) if type(c[k]) in (int, float)]
    container, key = draw.choice(found)
    container[key] = draw.choice([container[key] + 1, container[key] - 1, -container[key], container[key] * 2, 10**12])


def change_text(document: Document, draw: random.Random) -> None:
    found = [(c, k) for c, k in places(document["operations"]) if isinstance(c[k], str)]
    container, key = draw.choice(found)
    other, elsewhere = draw.choice(found)
    container[key] = draw.choice([*TEXTS, other[elsewhere]])


def rename_operand(document: Document, draw: random.Random) -> None:
    operands = draw.choice([o["operands"] for o in document["operations"] if o["operands"]])
    position = draw.randrange(len(operands))
    values = document["values"]
    alike = [name for name in values if values[name]["meta"] == values.get(operands[position], {}).get("meta")]
    operands[position] = draw.choice(draw.choice([alike or list(values), list(values)]))


def swap_operands(document: Document, draw: random.Random) -> None:
    one, other = (draw.choice([o["operands"] for o in document["operations"] if o["operands"]]) for _ in range(2))
    one = draw.choice((one, other))
    i, j = draw.randrange(len(one)), draw.randrange(len(other))
    one[i], other[j] = other[j], one[i]


def swap_names(document: Document, draw: random.Random) -> None:
    key = draw.choice(["arguments", "results", "constants"])
    names = document[key]
    if names:
        i, j = draw.randrange(len(names)), draw.randrange(len(names))
        names[i], names[j] = names[j], names[i]
        if i == j:
            names[i] = draw.choice(list(document["values"]))


def rename_value(document: Document, draw: random.Random) -> None:
    old = draw.choice(list(document["values"]))
    new = draw.choice(["fresh", f"{old}:2", f"{old}_gathered", old.partition(":")[0], *document["values"]])
    text = json.dumps(document).replace(json.dumps(old), json.dumps(new))
    document.update(json.loads(text))


def delete_operation(document: Document, draw: random.Random) -> None:
    del document["operations"][draw.randrange(len(document["operations"]))]


def repeat_operation(document: Document, draw: random.Random) -> None:
    """Once more, with results of other names, which later operations may take."""
    number = draw.randrange(len(document["operations"]))
    copied = copy.deepcopy(document["operations"][number])
    fresh = {name: f"{name.partition(':')[0]}:{900 + index}" for index, name in enumerate(copied["results"])}
    document["values"].update({new: copy.deepcopy(document["values"][old]) for old, new in fresh.items()})
    copied["results"] = list(fresh.values())
    at = draw.randrange(number + 1, len(document["operations"]) + 1)
    document["operations"].insert(at, copied)
    for operation in document["operations"][at + 1 :]:
        operation["operands"] = [fresh.get(name, name) for name in operation["operands"]]
    document["results"] = [fresh.get(name, name) for name in document["results"]]
    if draw.random() < 0.5:
        document["fallbacks"] = [n + (n >= at) for n in document["fallbacks"]]


def move_operation(document: Document, draw: random.Random) -> None:
    operations = document["operations"]
    item = operations.pop(draw.randrange(len(operations)))
    operations.insert(draw.randrange(len(operations) + 1), item)


def swap_in_operations(document: Document, draw: random.Random) -> None:
    one, other = draw.choice(document["operations"]), draw.choice(document["operations"])
    key = draw.choice(["of", "operator", "strategies", "results", "operands", "group", "code"])
    one[key], other[key] = other[key], one[key]


def mix_strategies(document: Document, draw: random.Random) -> None:
    """On one axis of one operation, that of another axis or of another operation."""
    found = [(o["strategies"], axis) for o in document["operations"] for axis in o["strategies"]]
    if found:
        (one, axis), (other, elsewhere) = draw.choice(found), draw.choice(found)
        one[axis] = copy.deepcopy(draw.choice([other[elsewhere], one[draw.choice(list(one))]]))


def replicate_operation(document: Document, draw: random.Random) -> None:
    """Run as if replicated, with specs that say so, or with the old ones."""
    operation = draw.choice([o for o in document["operations"] if o["strategies"]] or [document["operations"][0]])
    axis = draw.choice([*operation["strategies"], "data"])
    if axis in operation["strategies"]:
        whole = {key: ["Replicate()"] * len(operation[key]) for key in ("operands", "results")}
        operation["strategies"][axis] = {"label": "replicate", **whole}
    for name in [*operation["operands"], *operation["results"]] if draw.random() < 0.7 else ():
        entry = document["values"][name]
        entry["dims"] = [[a for a in axes if a != axis] for axes in entry["dims"]]
        entry["partial"] = {a: op for a, op in entry["partial"].items() if a != axis}


def reorder_axes(document: Document, draw: random.Random) -> None:
    """Another order of the axes, in strategies or in a spec."""
    if draw.random() < 0.3:
        for operation in document["operations"]:
            operation["strategies"] = dict(reversed(operation["strategies"].items()))
        return
    entry = draw.choice(list(document["values"].values()))
    entry["dims"] = [axes[::-1] for axes in entry["dims"]]
    if draw.random() < 0.5:
        entry["dims"] = entry["dims"][::-1]


def change_spec(document: Document, draw: random.Random) -> None:
    """One axis of one value, or of all values of one operation, elsewhere."""
    chosen = draw.choice(document["operations"])
    names = draw.choice([[draw.choice(list(document["values"]))], [*chosen["operands"], *chosen["results"]]])
    axis, to = draw.choice(list(document["mesh"])), draw.randrange(-2, 4)
    for name in names:
        entry = document["values"][name]
        entry["dims"] = [[a for a in axes if a != axis] for axes in entry["dims"]]
        entry["partial"] = {a: op for a, op in entry["partial"].items() if a != axis}
        if to == -2:
            entry["partial"][axis] = draw.choice(["sum", "max", "min"])
        elif 0 <= to < len(entry["dims"]):
            entry["dims"][to].insert(draw.randrange(len(entry["dims"][to]) + 1), axis)


def change_atoms(document: Document, draw: random.Random) -> None:
    """Other atoms of one value, joined or split or in another order, and dims with them."""
    entry = draw.choice(list(document["values"].values()))
    group = draw.choice(entry["atoms"] or [[]])
    kind = draw.randrange(3)
    if kind == 0:
        group.reverse()
    elif kind == 1 and group and group[0] % 2 == 0:
        group[:1] = [2, group[0] // 2]
        entry["dims"].insert(draw.randrange(len(entry["dims"]) + 1), [])
    elif len(group) > 1:
        group[:2] = [group[0] * group[1]]
        entry["dims"].pop(draw.randrange(len(entry["dims"])))


def insert_marker(document: Document, draw: random.Random) -> None:
    """Redistribute or relabel a value before one operation, to a spec of another value of its shape, or any."""
    operations, values = document["operations"], document["values"]
    at = draw.randrange(len(operations))
    if not operations[at]["operands"]:
        return
    position = draw.randrange(len(operations[at]["operands"]))
    old = operations[at]["operands"][position]
    if old not in values:
        return
    alike = [entry for entry in values.values() if entry["meta"] == values[old]["meta"]]
    new = f"{old.partition(':')[0]}_moved"
    values[new] = copy.deepcopy(draw.choice(alike))
    marker = {
        "results": [new],
        "operands": [old],
        "operator": draw.choice(["spmd.redistribute.default", "spmd.relabel.default"]),
    }
    blank = {"at": "", "code": "", "seconds": 0.0, "group": None, "of": None, "strategies": {}}
    operations.insert(at, {**blank, **marker})
    if draw.random() < 0.8:
        operations[at + 1]["operands"][position] = new
    if draw.random() < 0.4:
        back = f"{new}_back"
        values[back] = copy.deepcopy(values[old])
        operations.insert(at + 1, {**blank, **marker, "results": [back], "operands": [new]})
        operations[at + 2]["operands"][position] = back


def bypass_marker(document: Document, draw: random.Random) -> None:
    """Take a redistribution out, and its operand for its result."""
    markers = [o for o in document["operations"] if o["operator"].startswith("spmd.re") and o["operands"]]
    if not markers:
        return
    marker = draw.choice(markers)
    (old,), (new,) = marker["results"], marker["operands"]
    if draw.random() < 0.5:
        document["operations"].remove(marker)
        document["values"].pop(old, None)
    for operation in document["operations"]:
        operation["operands"] = [new if name == old else name for name in operation["operands"]]
    document["results"] = [new if name == old else name for name in document["results"]]


EDITS: tuple[Edit, ...] = (
    drop,
    replace,
    add,
    retype,
    change_number,
    change_text,
    rename_operand,
    rename_operand,
    swap_operands,
    swap_names,
    rename_value,
    delete_operation,
    repeat_operation,
    move_operation,
    swap_in_operations,
    mix_strategies,
    replicate_operation,
    reorder_axes,
    change_spec,
    change_spec,
    change_atoms,
    insert_marker,
    insert_marker,
    bypass_marker,
)
