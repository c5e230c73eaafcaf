"""Edits of the documents of saved plans, from crude to cunning: what a person, a tool or a bad disk does to a file."""

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import SpmdError
from spmd.plan.data.layout import Layout

Document = dict[str, Any]
Options = Sequence[Sequence[Document]]
"""The strategies that the rule of each operation of the program has."""

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


def edit(document: Document, mesh: Mesh, options: Options, draw: random.Random) -> Document:
    """A document with one thing changed, or two; most with the descriptions of values put right."""
    changed = document
    while changed == document:
        changed = _edited(changed, options, draw)
        if draw.random() < 0.2:
            with suppress(*BROKEN):
                changed = _edited(changed, options, draw)
        if draw.random() < 0.8:
            describe(changed, mesh)
    return changed


def _edited(document: Document, options: Options, draw: random.Random) -> Document:
    document = copy.deepcopy(document)
    if draw.random() < 0.15:
        reshard_operation(document, draw, options)
    else:
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
    """Redistribute or relabel an operand, to the spec of another value of its shape or one like its own, and back."""
    operations, values = document["operations"], document["values"]
    at = draw.randrange(len(operations))
    if not operations[at]["operands"]:
        return
    position = draw.randrange(len(operations[at]["operands"]))
    old = operations[at]["operands"][position]
    new = f"{old.partition(':')[0]}_moved"
    values[new] = copy.deepcopy(draw.choice([e for e in values.values() if e["meta"] == values[old]["meta"]]))
    if draw.random() < 0.5:
        turn(values[new], document, draw)
    operations.insert(at, marker(old, new, draw))
    at += 1
    if draw.random() < 0.5:
        operations.insert(at, marker(new, f"{new}_back", draw))
        values[f"{new}_back"] = copy.deepcopy(values[old])
        new, at = f"{new}_back", at + 1
    if draw.random() < 0.9:
        operations[at]["operands"][position] = new


def turn(entry: Document, document: Document, draw: random.Random) -> None:
    """Give a spec its axes in another order, or elsewhere."""
    axes = list(document["mesh"])
    swapped = dict(zip(axes, axes[::-1], strict=True))
    if draw.random() < 0.5:
        entry["dims"] = [[swapped[axis] for axis in dim] for dim in entry["dims"]]
        entry["partial"] = {swapped[axis]: op for axis, op in entry["partial"].items()}
    if draw.random() < 0.3:
        entry["dims"] = [dim[::-1] for dim in entry["dims"]]
    if draw.random() < 0.2:
        draw.shuffle(entry["dims"])


def marker(operand: str, result: str, draw: random.Random) -> Document:
    """An operation that moves a value, or claims to move nothing."""
    operator = draw.choice(["spmd.redistribute.default"] * 2 + ["spmd.relabel.default"])
    blank = {"at": "", "code": "", "seconds": 0.0, "group": None, "of": None, "strategies": {}, "held": 0}
    return {**blank, "operator": operator, "operands": [operand], "results": [result]}


def reshard_operation(document: Document, draw: random.Random, options: Options) -> None:
    """Run an operation by another strategy that its rule has, between redistributions that make it fit."""
    operations, values = document["operations"], document["values"]
    chosen = draw.choice([o for o in operations if o["strategies"]] or operations)
    if not chosen["strategies"]:
        return
    order = list(chosen["strategies"])
    axis, at = draw.choice(order), operations.index(chosen)
    strategy = draw.choice(options[chosen["of"]])
    chosen["strategies"][axis] = copy.deepcopy(strategy)
    for position, (name, state) in enumerate(zip(chosen["operands"], strategy["operands"], strict=True)):
        new = f"{name.partition(':')[0]}_in{position}"
        values[new] = placed(values[name], axis, state, order)
        operations.insert(at, {**marker(name, new, draw), "operator": "spmd.redistribute.default"})
        chosen["operands"][position], at = new, at + 1
    for position, (name, state) in enumerate(zip(chosen["results"], strategy["results"], strict=True)):
        new = f"{name.partition(':')[0]}_out{position}"
        values[new] = placed(values[name], axis, state, order)
        operations.insert(at + 1, {**marker(new, name, draw), "operator": "spmd.redistribute.default"})
        chosen["results"][position] = new


def placed(entry: Document, axis: str, state: str, order: list[str]) -> Document:
    """The spec of a value with another placement on one axis."""
    entry = copy.deepcopy(entry)
    entry["dims"] = [[a for a in axes if a != axis] for axes in entry["dims"]]
    entry["partial"] = {a: op for a, op in entry["partial"].items() if a != axis}
    if state.startswith("Shard"):
        dim = int(state[6:-1])
        entry["dims"][dim] = sorted([*entry["dims"][dim], axis], key=order.index)
    elif state.startswith("Partial"):
        entry["partial"][axis] = state[9:-2]
    return entry


def swap_operations(document: Document, draw: random.Random) -> None:
    operations = document["operations"]
    i = draw.randrange(len(operations))
    j = draw.choice([draw.randrange(len(operations)), min(i + 1, len(operations) - 1), min(i + 2, len(operations) - 1)])
    operations[i], operations[j] = operations[j], operations[i]


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
    swap_operations,
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
