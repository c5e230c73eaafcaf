"""Mistakes with loops and branches, where JAX has tests of its own: each error says what was got and what to do."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd import P

MESH = spmd.make_mesh({"x": 2}, runtime="virtual")
ONE: Any = torch.tensor(1.0)
INTEGER: Any = torch.tensor(0, dtype=torch.int32)
ANY: Any = 42
Point = namedtuple("Point", ["x", "y"])
STRUCTURE = "has another structure than the one it gets: "


def scan(f: Callable[[Any, Any], Any], init: Any) -> Callable[[], Any]:
    return lambda: spmd.scan(f, init, None, length=1)


NO_FUNCTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "fori_loop": (lambda: spmd.fori_loop(0, 1, ANY, 0), r"spmd.fori_loop .*body_fun must be a function \(got int 42\)"),
    "while_loop": (lambda: spmd.while_loop(ANY, ANY, 0), r"spmd.while_loop .*cond_fun must be a function \(got int 42"),
    "switch": (lambda: spmd.switch(0, [ANY]), r"spmd.switch .*branches\[0\] must be a function \(got int 42\)"),
    "cond": (lambda: spmd.cond(0, ANY, ANY), r"spmd.cond .*true_fun must be a function \(got int 42\)"),
    "scan": (lambda: spmd.scan(ANY, 0, ONE), r"spmd.scan .*f must be a function \(got int 42\)"),
    "associative_scan": (lambda: spmd.associative_scan(ANY, ONE), r"spmd.associative_scan .*fn must be a function"),
}
WHILES = {
    "a pair": (
        lambda: spmd.while_loop(lambda c: (1.0, 1.0), lambda c: c, 0.0),
        r"what cond_fun returns must be a boolean scalar \(got tuple \(1.0, 1.0\)\)",
    ),
    "a float": (
        lambda: spmd.while_loop(lambda c: ONE, lambda c: c, ONE),
        r"what cond_fun returns must be a boolean scalar \(got f32\[\]\)\. Compare",
    ),
    "another structure": (
        lambda: spmd.while_loop(lambda c: True, lambda c: (1.0, 1.0), 0.0),
        rf"body_fun returns {STRUCTURE}\(f32\[\], f32\[\]\), where it gets f32\[\]",
    ),
    "another dtype": (
        lambda: spmd.while_loop(lambda c: True, lambda c: (True, True), (True, ONE)),
        r"carry\[1\] is f32\[\] when body_fun gets it, and b8\[\] when it returns it",
    ),
}
CONDS = {
    "a function": (
        lambda: spmd.cond(lambda x: True, lambda x: 2.0, lambda x: 3.0, 1.0),  # type: ignore[arg-type]
        r"pred must be a boolean scalar \(got function",
    ),
    "text": (lambda: spmd.cond("foo", lambda x: 2.0, lambda x: 3.0, 1.0), r"\(got str 'foo'\)"),  # type: ignore[arg-type]
    "None": (lambda: spmd.cond(None, lambda x: x + 1, lambda x: x + 2, ONE), r"\(got NoneType None\)"),  # type: ignore[arg-type]
    "a pair": (lambda: spmd.cond((1.0, 1.0), lambda x: 2.0, lambda x: 3.0, 1.0), r"\(got tuple \(1.0, 1.0\)\)"),  # type: ignore[arg-type]
    "two structures": (
        lambda: spmd.cond(True, lambda x: {"a": 2.0}, lambda x: {"a": (3.0, 3.0)}, 1.0),  # type: ignore[arg-type, return-value]
        r"false_fun returns \{'a': \(f32\[\], f32\[\]\)\}, and true_fun returns \{'a': f32\[\]\}",
    ),
    "two shapes": (
        lambda: spmd.cond(True, lambda x: torch.ones(1), lambda x: torch.tensor(1.0), 1.0),
        r"false_fun returns f32\[\], and true_fun returns f32\[1\]",
    ),
}
SWITCHES = {
    "a function": (lambda: spmd.switch(lambda x: True, [torch.sin], ONE), r"index must be an integer .*\(got function"),  # type: ignore[arg-type]
    "text": (lambda: spmd.switch("foo", [torch.sin], ONE), r"\(got str 'foo'\)"),  # type: ignore[arg-type]
    "a pair": (lambda: spmd.switch((1.0, 1.0), [torch.sin], ONE), r"\(got tuple \(1.0, 1.0\)\)"),  # type: ignore[arg-type]
    "nothing": (lambda: spmd.switch(0, [], ONE), r"branches must be a list of at least one function"),
}
COMPARED = {
    "two structures": (
        lambda: spmd.switch(ANY, [lambda x: {"a": 2.0}, lambda x: {"a": (3.0, 3.0)}], ONE),
        r"branches\[1\] returns \{'a': \(f32\[\], f32\[\]\)\}, and branches\[0\] returns \{'a': f32\[\]\}",
    ),
    "two shapes": (
        lambda: spmd.switch(ANY, [lambda x: {"a": torch.ones(1)}, lambda x: {"a": torch.tensor(1.0)}], ONE),
        r"branches\[1\] returns f32\[\] at \['a'\], and branches\[0\] returns f32\[1\]",
    ),
}
STRUCTURES = {
    "three for two": (
        lambda: spmd.scan(lambda c, x: ((0, 0, 0), x), (1, (2, 3)), torch.arange(5)),
        rf"{STRUCTURE}\(i64\[\], i64\[\], i64\[\]\), where it gets \(i64\[\], \(i64\[\], i64\[\]\)\)",
    ),
    "one for two": (scan(lambda c, _: ((c[0],), None), (INTEGER,) * 2), r"\(i32\[\],\), where it gets \(i32\[\], i32"),
    "a list for a tuple": (
        scan(lambda c, _: ([c[0]] * 2, None), (INTEGER,) * 2),
        r"\[i32\[\], i32\[\]\], where it gets \(i32\[\], i32\[\]\)",
    ),
    "one more key": (
        scan(lambda c, _: ({"a": c["a"], "b": c["a"]}, None), {"a": INTEGER}),
        r"\{'a': i32\[\], 'b': i32\[\]\}, where it gets \{'a': i32\[\]\}",
    ),
    "one more key inside": (
        scan(lambda c, _: (({"a": c[0]["a"], "b": c[0]["a"]},) * 2, None), ({"a": INTEGER},) * 2),
        r"'b': i32\[\]\}\), where it gets \(\{'a': i32\[\]\}, \{'a': i32\[\]\}\)",
    ),
    "another key": (
        lambda: spmd.fori_loop(0, 1, lambda i, x: {"T": torch.tensor([0.5])}, {"t": torch.ones(1)}),
        r"\{'T': f32\[1\]\}, where it gets \{'t': f32\[1\]\}",
    ),
}
TYPES = {
    "a leaf": (scan(lambda c, _: (c.float(), None), INTEGER), r"carry is i32\[\] when f gets it, and f32\[\] when it"),
    "the second": (
        scan(lambda c, _: ((c[0], c[1].float()), None), (INTEGER,) * 2),
        r"carry\[1\] is i32\[\] when f gets it, and f32\[\] when it returns it",
    ),
    "the shape too": (
        scan(lambda c, _: ((c[0], c[1].float().reshape(1, 1)), None), (INTEGER,) * 2),
        r"carry\[1\] is i32\[\] when f gets it, and f32\[1,1\] when it returns it",
    ),
}
OTHERS = {
    "bounds of two dtypes": (
        lambda: spmd.fori_loop(torch.tensor(0, dtype=torch.int16), INTEGER, lambda i, c: c, ONE),
        r"lower and upper must have one dtype \(got i16\[\] and i32\[\]\)",
    ),
    "a list of numbers for rows": (
        lambda: spmd.scan(lambda p, i: (p, i), Point(ONE, ONE), list(range(5))),
        r"xs\[0\] has no dim to scan over \(got int 0\)",
    ),
    "no pair": (lambda: spmd.scan(lambda c, x: 0.0, 0, torch.arange(5.0)), r"f must return a pair.*\(got float\)"),
    "a length that is another": (
        lambda: spmd.scan(lambda *args: args, 0, torch.arange(10), length=5),
        r"the same number of rows in dim 0 \(got: length is 5, xs has 10\)",
    ),
    "a negative unroll": (
        lambda: spmd.scan(lambda x, _: (x, x), 0, torch.arange(5), unroll=-1),
        r"unroll must be a bool or an integer of 0 or more \(got int -1\)",
    ),
}


def check(mistake: Callable[[], Any], text: str) -> None:
    """The error outside of `jit`, and of a function under it."""
    for call in (mistake, spmd.jit(lambda x: (mistake(), x)[1], P(), mesh=MESH)):
        with pytest.raises(spmd.TraceError, match=text):
            call(*() if call is mistake else (ONE,))


def of(cases: dict[str, tuple[Callable[[], Any], str]]) -> Any:
    return pytest.mark.parametrize("mistake, text", cases.values(), ids=cases)


@of(NO_FUNCTIONS)
def test_no_functions(mistake: Any, text: str) -> None:
    check(mistake, text)


@of(WHILES)
def test_conditions_and_bodies(mistake: Any, text: str) -> None:
    check(mistake, text)


@of(CONDS)
def test_predicates_and_branches(mistake: Any, text: str) -> None:
    check(mistake, text)


@of(SWITCHES)
def test_indexes_and_branches(mistake: Any, text: str) -> None:
    check(mistake, text)


@of(COMPARED)
def test_branches_are_compared(mistake: Any, text: str) -> None:
    with pytest.raises(spmd.TraceError, match=text):
        mistake()


@of(STRUCTURES)
def test_carries_of_another_structure(mistake: Any, text: str) -> None:
    check(mistake, text)


@of(TYPES)
def test_carries_of_another_type(mistake: Any, text: str) -> None:
    check(mistake, text)


@of(OTHERS)
def test_arguments(mistake: Any, text: str) -> None:
    check(mistake, text)


@pytest.mark.parametrize("name", ["length", "unroll"])
def test_a_number_of_trips_that_is_data(name: str) -> None:
    def f(n: Any, x: Any) -> Any:
        options = {"length": 10} | {name: n}
        return spmd.scan(lambda c, z: (c, z), x, (), **options)

    with pytest.raises(spmd.TraceError, match=rf"{name} must be .*integer of 0 or more \(got TracedTensor"):
        spmd.jit(f, (P(), P()), mesh=MESH)(torch.tensor(3), ONE)
