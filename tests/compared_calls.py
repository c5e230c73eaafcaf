"""Functions compared with plain torch: called on plain tensors, and as one program of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from manual_cases import GRID, assert_same
from torch import Tensor
from torch.func import grad, jvp

import spmd
from spmd import P

Function = Callable[..., Any]
THREE = spmd.make_mesh({"x": 3}, runtime="virtual")


def spec_of_rows(x: Tensor) -> P:
    """Dim 0 over the axis `x`, evenly or not."""
    return P("x") if isinstance(x, Tensor) and x.ndim else P()


def program(f: Function, *args: Any, mesh: spmd.Mesh = THREE, specs: tuple[P, ...] | None = None) -> Any:
    """The results of a function as one program."""
    return spmd.jit(f, specs or tuple(map(spec_of_rows, args)), mesh=mesh)(*args)


def check(f: Function, expected: Any, *args: Any, **options: Any) -> None:
    """Compare a function on plain tensors, and as one program, with values or with a function of plain torch."""
    wanted = expected(*args) if callable(expected) else expected
    assert_close(f(*args), wanted)
    assert_close(program(f, *args, **options), wanted)


def assert_close(actual: Any, expected: Any) -> None:
    """Values are equal, whether Python's numbers or tensors."""
    assert_same(tensors(actual), tensors(expected))


def tensors(tree: Any) -> Any:
    """The tree with tensors for numbers, and tuples for lists."""
    if isinstance(tree, (tuple, list)):
        return tuple(map(tensors, tree))
    return torch.tensor(tree) if isinstance(tree, (bool, int, float)) else tree


def check_derivatives(
    f: Function, reference: Function, *args: Tensor, reverse: bool = True, twice: bool = False, **options: Any
) -> None:
    """Compare values and derivatives with those of plain torch.

    Args:
        reverse: whether also those of reverse mode.
        twice: whether also second derivatives: in reverse mode, or in forward mode if that is the only one.
    """
    positions = tuple(range(len(args)))

    def derivatives(g: Function) -> Function:
        slopes = grad(lambda *x: loss(g(*x)), positions)

        def all_of_them(*inputs: Tensor) -> Any:
            forward = lambda *x: jvp(g, x, inputs)  # noqa: E731
            found = [jvp(forward, inputs, inputs) if twice and not reverse else forward(*inputs)]
            if reverse:
                found.append(slopes(*inputs))
            if reverse and twice:
                found.append(grad(lambda *x: loss(slopes(*x)), positions)(*inputs))
            return found

        return all_of_them

    check(derivatives(f), derivatives(reference), *args, mesh=GRID, **options)


def loss(tree: Any) -> Tensor:
    """A sum of nonlinear functions of all leaves."""
    leaves = torch.utils._pytree.tree_leaves(tree)
    total: Tensor = sum(x.sin().sum() for x in leaves if x.is_floating_point())  # type: ignore[assignment]
    return total


def scan_by_hand(f: Function, init: Any, xs: Any) -> Any:
    """`scan` as a loop of Python over a tensor, or a tuple of tensors."""
    carry, rows = init, []
    for x in zip(*xs, strict=True) if isinstance(xs, tuple) else xs:
        carry, y = f(carry, x)
        rows.append(y)
    return carry, torch.stack(rows)


def while_by_hand(condition: Function, body: Function, carry: Any) -> Any:
    """`while_loop` as a loop of Python."""
    while condition(carry):
        carry = body(carry)
    return carry
