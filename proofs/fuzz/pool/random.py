"""Random numbers from torch's default generator, which is seeded before a program runs."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Block, Draw, Operator, unary


def _permuted(d: Draw) -> str:
    x = d.floats((1, 3), nonempty=True)
    return f"{x}[torch.randperm({x.shape[0]})]"


def _new(d: Draw) -> str:
    x = d.floats((0, 3))
    return d.choice(
        f"torch.rand({x.shape}) * {x}", f"torch.randn({x.shape}) + {x}", f"torch.randint(0, 4, {x.shape}) * {x}"
    )


def _twice(d: Draw) -> str:
    """Two equal random calls, which return different numbers."""
    x = d.floats((1, 3))
    made = d.choice(f"torch.rand({x.shape})", f"torch.rand_like({x})", f"F.dropout({x}, 0.4)")
    return f"{made} - {made}"


def _unused(d: Draw) -> Block:
    """A random operator whose result is not used still advances the generator."""
    x, name = d.floats((1, 3)), d.name()
    return Block((f"torch.rand({x.shape})", f"{name} = {x} * torch.rand({x.shape})"), (name,))


def _in_place(d: Draw) -> Block:
    x, name = d.floats((1, 3), nonempty=True), d.name()
    made = d.choice(f"torch.zeros_like({x})", f"torch.empty({x.shape[::-1]}).permute(*range({x.ndim - 1}, -1, -1))")
    change = d.choice("uniform_()", "normal_()", "bernoulli_(0.4)")
    return Block((f"{name} = {made}", f"{name}.{change}"), (name,))


def _in_memory_order(d: Draw) -> Block:
    """Random numbers written to a tensor that is not in row-major order in memory."""
    x, name = d.floats(2, nonempty=True), d.name()
    rows, columns = x.shape
    return Block((f"{name} = torch.empty({columns}, {rows}).t()", f"{name}.bernoulli_(0.4)"), (name,))


def _after_write(d: Draw) -> Block:
    """A random operator after a write in place, in the memory order of the written tensor."""
    x, name, other = d.floats(2, nonempty=True), d.name(), d.name()
    rows, columns = x.shape
    written = f"{name} = torch.zeros({columns}, {rows}).t()"
    write = d.choice(f"torch.mul({x}, 2, out={name})", f"{name}.index_add_(0, torch.arange({rows}), {x})")
    return Block((written, write, f"{other} = {name} + torch.randn_like({name})"), (name, other))


OPERATORS: Mapping[str, Operator] = {
    "dropout": unary("F.dropout({x}, 0.3)"),
    "dropout_none": unary("F.dropout({x}, 0.5, training=False) * {n}"),
    "rand_like": unary("{x} * torch.rand_like({x})"),
    "randn_like": unary("torch.randn_like({x}) - {x}"),
    "bernoulli": unary("torch.bernoulli({x}.sigmoid()) + {x}"),
    "randperm": _permuted,
    "rand": _new,
    "rand_twice": _twice,
    "rand_unused": _unused,
    "rand_inplace": _in_place,
    "rand_in_memory_order": _in_memory_order,
    "draw_after_write": _after_write,
}
