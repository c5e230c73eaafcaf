"""Loops and branches, whose bodies are random statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from proofs.fuzz.pool.operator import Block, Draw, Operand, Operator, Rejected
from proofs.fuzz.tensors import Kind

_BOUNDED: Mapping[Kind, tuple[str, ...]] = {
    Kind.FLOAT: ("{}.tanh()", "{}.sin()", "{} * 0.7", "{}"),
    Kind.COMPLEX: ("{} * 0.5", "{} / ({}.abs() + 1)"),
    Kind.INT: ("{} % 7", "{} // 2"),
    Kind.BOOL: ("{}", "~{}"),
}
"""By kind, expressions that keep a value small from trip to trip."""


@attrs.frozen
class _Leaf:
    """One of the values that a loop carries.

    Args:
        name: its name in the body.
        init: an expression of its first value.
        next: draws an expression of its value in the next trip.
    """

    name: str
    init: str
    next: Callable[[], str]


def _carry(d: Draw) -> list[_Leaf]:
    """What a loop carries: one value that the body computes and, at random, others of all kinds."""
    x = d.anything((0, 3), fresh=0.3)
    leaves = [_Leaf(d.name(), x, lambda: _bounded(d, x))]
    if d.maybe(0.4):
        y, name = d.floats((0, 3), fresh=0.3), d.name()
        leaves.append(_Leaf(name, y, lambda: f"{name}.sin() + {d.number()}"))  # read by nothing else, often
    if d.maybe(0.35):
        count = d.name()
        leaves.append(_Leaf(count, d.choice("0", "torch.tensor(0)", "1"), lambda: f"{count} + 1"))
    if d.maybe(0.3):
        fixed = d.name()
        leaves.append(_Leaf(fixed, d.anything((0, 3)), lambda: fixed))
    if d.maybe(0.25):
        first, second = d.name(), d.name()
        leaves += [_Leaf(first, x, lambda: second), _Leaf(second, f"{d.like(x, _kind(x))}", lambda: first)]
    d.rng.shuffle(leaves)
    return leaves


def _kind(x: Operand) -> Kind:
    kind = Kind.of(x.tensor)
    if kind is None:
        raise Rejected("another kind")
    return kind


def _made(d: Draw, x: Operand) -> Operand:
    """A value that the body computes, in the shape and of the kind of another, if there is one; else a parameter."""
    own = [name for name in d.values if name not in d.foreign]
    found = [name for name in own if Kind.of(d.environment.values[name]) is _kind(x)]
    equal = [name for name in found if d.environment.values[name].shape == x.shape]
    return Operand(d.choice(*equal), x.tensor) if equal else d.adapted(_kind(x), x.shape, found or d.values)


def _bounded(d: Draw, x: Operand) -> str:
    made = _made(d, x)
    return d.choice(*_BOUNDED[_kind(x)]).format(made, made)


def _defined(name: str, parameters: Sequence[Sequence[str]], lines: Sequence[str], result: str) -> list[str]:
    """A function; parameters of several values are tuples."""
    names = [names[0] if len(names) == 1 else f"arg_{n}" for n, names in enumerate(parameters)]
    parts = [f"{', '.join(values)} = {name}" for name, values in zip(names, parameters, strict=True) if len(values) > 1]
    body = [part for line in (*parts, *lines, f"return {result}") for part in line.split("\n")]
    return [f"def {name}({', '.join(names)}):", *(f"    {line}" for line in body)]


def _tuple(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"({', '.join(values)})"


def _called(d: Draw, functions: Sequence[str], call: str, structure: Sequence[int]) -> Block:
    """The statements of a call; `structure` has the number of values in each part of what it returns."""
    parts = [[d.name() for _ in range(count)] for count in structure]
    targets = ", ".join(_tuple(part) if part else "_" for part in parts)
    return Block((*functions, f"{targets} = {call}"), tuple(name for part in parts for name in part))


def _function_name(d: Draw) -> str:
    return f"body_{d.name()[1:]}"


def _xs(d: Draw) -> list[Operand]:
    """What a loop takes row by row, mostly few rows."""
    x = d.anything((1, 4), where=lambda t: t.shape[0] < 6)
    if d.maybe(0.3):
        y = d.tensor(tuple(Kind), (1, 3), where=lambda t: t.shape[0] == x.shape[0], make=lambda: (x.shape[0], 2))
        return [x, y]
    return [x]


def _rows(d: Draw, xs: Sequence[Operand]) -> tuple[list[str], list[str]]:
    """The expressions of rows and of the first of them; sometimes of fewer rows, or none."""
    rows = d.choice("", "", "", "", "", "[:1]", "[:0]" if d.maybe(0.3) else "[1:]" if xs[0].shape[0] > 1 else "")
    first = [f"{x}[0]" if x.shape[0] else f"torch.ones_like({x}.sum(0))" for x in xs]
    return [f"{x}{rows}" for x in xs], first


def _ys(d: Draw) -> list[str]:
    return [d.anything((0, 3)) for _ in range(d.choice(0, 1, 1, 2))]


def _options(d: Draw) -> str:
    unroll = d.choice("2", "2", "True")
    return (", reverse=True" if d.maybe(0.35) else "") + (f", unroll={unroll}" if d.maybe(0.25) else "")


def _scan(d: Draw) -> Block:
    leaves, xs, name = _carry(d), _xs(d), _function_name(d)
    carry, items = [leaf.name for leaf in leaves], [d.name() for _ in xs]
    rows, first = _rows(d, xs)
    given = {leaf.name: _first(leaf) for leaf in leaves} | dict(zip(items, first, strict=True))
    with d.body(given) as lines:
        new, ys = [leaf.next() for leaf in leaves], _ys(d)
    result = f"{_tuple(new)}, {_tuple(ys) if ys else None}"
    call = f"spmd.scan({_body(d, name)}, {_tuple([leaf.init for leaf in leaves])}, {_tuple(rows)}{_options(d)})"
    return _called(d, _defined(name, [carry, items], lines, result), call, [len(new), len(ys)])


def _first(leaf: _Leaf) -> str:
    return f"torch.tensor({leaf.init})" if leaf.init.isdigit() else leaf.init


def _body(d: Draw, name: str) -> str:
    """The function of a loop, sometimes one whose values the gradient computes again."""
    if d.maybe(0.85):
        return name
    again = f"functools.partial(torch.utils.checkpoint.checkpoint, {name}, use_reentrant=False)"
    return f"({again} if is_tracing() else {name})"  # torch refuses it under its own transforms


def _loop_over_numbers(d: Draw) -> Block:
    """A `fori_loop` whose body also reads the row of its number."""
    leaves, name, turn, row = _carry(d), _function_name(d), d.name(), d.name()
    low, trips = d.choice(0, 0, 1, -1), d.choice(0, 1, 2, 3, 3, 4)
    x = d.anything((1, 4), nonempty=True)
    read = f"{x}[{turn} % {x.shape[0]}]"
    with d.body({leaf.name: _first(leaf) for leaf in leaves} | {turn: f"torch.tensor({low})", row: read}) as lines:
        new = [leaf.next() for leaf in leaves]
    carry = [leaf.name for leaf in leaves]
    function = _defined(name, [[turn], carry], [f"{row} = {read}", *lines], _tuple(new))
    call = f"spmd.fori_loop({low}, {low + trips}, {name}, {_tuple([leaf.init for leaf in leaves])})"
    return _called(d, function, call, [len(new)])


def _loop_over_nothing(d: Draw) -> Block:
    leaves, name = _carry(d), _function_name(d)
    with d.body({leaf.name: _first(leaf) for leaf in leaves}) as lines:
        new, ys = [leaf.next() for leaf in leaves], _ys(d)
    function = _defined(name, [[leaf.name for leaf in leaves], ["_"]], lines, f"{_tuple(new)}, {_tuple(ys) or None}")
    init = _tuple([leaf.init for leaf in leaves])
    call = f"spmd.scan({_body(d, name)}, {init}, length={d.choice(0, 1, 2, 3, 4)}{_options(d)})"
    return _called(d, function, call, [len(new), len(ys)])


def _while(d: Draw) -> Block:
    """A `while_loop` that ends by its values, or after some trips; reverse mode does not take it."""
    if d.in_reverse:
        raise Rejected("reverse mode")
    leaves, name, count = _carry(d), _function_name(d), d.name()
    leaves.insert(0, _Leaf(count, "0", lambda: f"{count} + 1"))
    with d.body({leaf.name: _first(leaf) for leaf in leaves}) as lines:
        new = [leaf.next() for leaf in leaves]
    tested, most = d.choice(*leaves[1:]), d.integer(0, 4)
    goes_on = d.choice(f"{count} < {most}", f"({count} < {most}) & {_predicate(d, tested.name)}")
    names = [leaf.name for leaf in leaves]
    functions = _defined(f"goes_on_{name}", [names], [], goes_on) + _defined(name, [names], lines, _tuple(new))
    call = f"spmd.while_loop(goes_on_{name}, {name}, {_tuple([leaf.init for leaf in leaves])})"
    return _called(d, functions, call, [len(new)])


def _predicate(d: Draw, x: str) -> str:
    """A scalar that is true or false as the values are."""
    number = f"torch.view_as_real({x} * (1 + 0j)).sum()"
    return d.choice(f"({number} > {d.number()})", f"({number} < {d.number()})")


def _side(d: Draw, operands: Sequence[Operand], like: Sequence[Operand]) -> tuple[str, list[str]]:
    """A function of operands whose results are like some values."""
    name, parameters = _function_name(d), [d.name() for _ in operands]
    with d.body(dict(zip(parameters, operands, strict=True))) as lines:
        results = [_made(d, x) for x in like]
    return name, _defined(name, [[parameter] for parameter in parameters], lines, _tuple(results))


def _sides(d: Draw, count: int, call: str) -> Block:
    """A call with functions of which one runs."""
    operands = [d.anything((0, 3)) for _ in range(d.integer(0, 2))]
    like = [d.anything((0, 3)) for _ in range(d.integer(1, 2))]
    made = [_side(d, operands, like) for _ in range(count)]
    names = ", ".join(name for name, _ in made)
    text = call.format(names, "".join(f", {x}" for x in operands))
    return _called(d, [line for _, lines in made for line in lines], text, [len(like)])


def _cond(d: Draw) -> Block:
    predicate = "True" if d.maybe(0.05) else _predicate(d, d.anything((0, 3)))
    return _sides(d, 2, f"spmd.cond({predicate}, {{}}{{}})")


def _switch(d: Draw) -> Block:
    x, count = d.anything((0, 3)), d.integer(2, 3)
    index = f"(({x}.abs() * 2).sum().long() % {count + 2} - 1)" if _kind(x) is not Kind.BOOL else f"{x}.sum()"
    return _sides(d, count, f"spmd.switch({index}, [{{}}]{{}})")


def _map(d: Draw) -> Block:
    xs, name = _xs(d), _function_name(d)
    items, (rows, first) = [d.name() for _ in xs], _rows(d, xs)
    with d.body(dict(zip(items, first, strict=True))) as lines:
        ys = _ys(d) or [items[0]]
    batch = f", batch_size={d.integer(1, 3)}" if d.maybe(0.4) else ""
    call = f"spmd.map({name}, {_tuple(rows)}{batch})"
    return _called(d, _defined(name, [items], lines, _tuple(ys)), call, [len(ys)])


def _associative_scan(d: Draw) -> str:
    x = d.floats((1, 3), nonempty=True)
    dim = d.dim(x)
    options = f"{', reverse=True' if d.maybe(0.4) else ''}, dim={dim}"
    pair = f"spmd.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), ({x}.tanh(), {d.like(x)}){options})"
    function = d.choice("a + b", "a * b", "torch.maximum(a, b)", "a + b + a * b * 0.3")
    return d.choice(pair, f"spmd.associative_scan(lambda a, b: {function}, {x}.tanh(){options})")


LOOPS: Mapping[str, Operator] = {
    "scan": _scan,
    "cond": _cond,
    "fori_loop": _loop_over_numbers,
    "while_loop": _while,
    "switch": _switch,
    "scan_of_length": _loop_over_nothing,
    "map": _map,
    "associative_scan": _associative_scan,
}
"""Loops and branches, by name; each takes its turn."""
