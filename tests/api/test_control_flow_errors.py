"""Mistakes with loops and branches: an error of ours that names the user's line, what was got, and what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd import P

X = torch.ones(3)
ROWS = torch.ones(2, 3)
MESH = spmd.make_mesh({"data": 2}, runtime="virtual")


def scan(carry: Callable[[Any], Any], init: Any) -> Any:
    return lambda: spmd.scan(lambda c, x: (carry(c), x), init, ROWS)


CARRY = "What a loop carries keeps its structure, shapes and dtypes in every trip"
ALIKE = "All results must have one structure, with the same shapes and dtypes"

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "carry of another shape": (
        scan(lambda c: torch.cat([c, c]), X),
        rf"carry is f32\[3\] when f gets it, and f32\[6\] when it returns it\. {CARRY}\.",
    ),
    "carry of another dtype": (
        scan(lambda c: {"a": c["a"].double()}, {"a": X}),
        rf"carry\['a'\] is f32\[3\] when f gets it, and f64\[3\] when it returns it. {CARRY}; here .to\(torch.fl",
    ),
    "carry of another structure": (
        scan(lambda c: (c,), X),
        r"the carry that f returns has another structure than the one it gets: \(f32\[3\],\), where it gets f32\[3\]",
    ),
    "carry with another key": (scan(lambda c: {"b": c["a"]}, {"a": X}), r"\{'b': f32\[3\]\}, where it gets \{'a': f32"),
    "carry of another length": (scan(lambda c: c[:1], (X, X)), r"\(f32\[3\],\), where it gets \(f32\[3\], f32\[3\]\)"),
    "None for the carry": (scan(lambda c: None, X), r"another structure than the one it gets: None, where it gets"),
    "a number that gets dims": (scan(lambda c: c + X, 0.0), r"carry is f32\[\] when f gets it, and f32\[3\] when"),
    "a float that comes back as an integer": (scan(lambda c: 1, 0.5), r"carry is f32\[\] when f gets it, and i64\[\]"),
    "a truth value that becomes a number": (
        scan(lambda c: c + 1, True),
        r"carry is b8\[\] when f gets it, and i64\[\]",
    ),
    "text in the carry": (
        scan(lambda c: c, {"a": "text"}),
        r"init\['a'\] must be a tensor or a number \(got str 'text'",
    ),
    "a function for the carry": (scan(lambda c: c, torch.sin), r"init must be a tensor or a number \(got builtin_func"),
    "a module for the carry": (
        scan(lambda c: c, torch.nn.Linear(2, 2)),
        r"init must be a tensor or a number \(got Linear .*Pass its state, dict\(module.named_parameters\(\)\)",
    ),
    "text that comes back": (
        scan(lambda c: "text", X),
        r"the carry that f returns must be a tensor or a number \(got str",
    ),
    "no pair": (
        lambda: spmd.scan(lambda c, x: c + x, X, ROWS),
        r"f must return a pair, the next carry and a result \(got f32\[3\]\)\. Return \(carry, None\)",
    ),
    "a triple": (
        lambda: spmd.scan(lambda c, x: (c, x, x), X, ROWS),
        r"f must return a pair.*\(got \(f32\[3\], f32\[3\], f32\[3\]\)\)",
    ),
    "nothing": (lambda: spmd.scan(lambda c, x: None, X, ROWS), r"f must return a pair.*\(got None\)"),
    "text as a result": (lambda: spmd.scan(lambda c, x: (c, {"y": "a"}), X, ROWS), r"the result of f\['y'\] must be a"),
    "results that differ": (
        lambda: spmd.scan(lambda c, x: (c + 1, torch.ones(int(c))), 1, length=3),
        rf"f returns f32\[2\], and f returns f32\[1\] in another trip\. {ALIKE}",
    ),
    "no function": (lambda: spmd.scan(X, X, ROWS), r"f must be a function \(got Tensor tensor\(\[1"),
    "lengths that differ": (
        lambda: spmd.scan(lambda c, x: (c, None), X, {"a": ROWS, "b": torch.ones(3)}),
        r"all xs must have the same number of rows in dim 0 \(got: xs\['a'\] has 2, xs\['b'\] has 3\)",
    ),
    "length= that differs": (
        lambda: spmd.scan(lambda c, x: (c, None), X, ROWS, length=3),
        r"the same number of rows in dim 0 \(got: length is 3, xs has 2\)",
    ),
    "neither xs nor length": (
        lambda: spmd.scan(lambda c, x: (c, None), X),
        r"has no tensor in xs, which says how many trips it makes\. Pass xs, or length=",
    ),
    "a scalar for xs": (
        lambda: spmd.scan(lambda c, x: (c, None), X, [ROWS, torch.tensor(1.0)]),
        r"xs\[1\] has no dim to scan over \(got f32\[\]\)\. Stack what the trips read",
    ),
    "numbers for xs": (
        lambda: spmd.scan(lambda c, x: (c, None), X, [1, 2]),
        r"xs\[0\] has no dim to scan over \(got int 1\)",
    ),
    "a range for xs": (
        lambda: spmd.scan(lambda c, x: (c, x), X, range(3)),
        r"xs must be a tensor or a number \(got range",
    ),
    "a negative length": (
        lambda: spmd.scan(lambda c, x: (c, None), X, length=-1),
        r"length must be an integer of 0 or more \(got int -1\)",
    ),
    "a float for the length": (lambda: spmd.scan(lambda c, x: (c, x), X, length=2.0), r"of 0 or more \(got float 2.0"),  # type: ignore[arg-type]
    "unroll of less than nothing": (
        lambda: spmd.scan(lambda c, x: (c, x), X, ROWS, unroll=-1),
        r"unroll must be a bool or an integer of 0 or more \(got int -1\)",
    ),
    "unroll of a range that is data": (
        lambda: spmd.fori_loop(0, torch.tensor(3), lambda i, x: x, X, unroll=2),
        r"unroll=2 needs integers of Python for lower and upper \(got a tensor, whose value is not known",
    ),
    "no function for a while_loop": (
        lambda: spmd.while_loop(True, lambda x: x, X),  # type: ignore[arg-type]
        r"cond_fun must be a function \(got bool True\)",
    ),
    "a condition with dims": (
        lambda: spmd.while_loop(lambda x: x > 0, lambda x: x, X),
        r"what cond_fun returns must be a boolean scalar \(got b8\[3\]\)\. x.all\(\) or x.any\(\) makes one of many",
    ),
    "a condition that is a number": (
        lambda: spmd.while_loop(lambda x: x.sum(), lambda x: x, X),
        r"what cond_fun returns must be a boolean scalar \(got f32\[\]\)\. Compare, as in x > 0",
    ),
    "a condition that is a number of Python": (
        lambda: spmd.while_loop(lambda x: 1, lambda x: x, X),
        r"must be a boolean scalar \(got int 1\)",
    ),
    "a condition that is a pair": (
        lambda: spmd.while_loop(lambda x: (x.sum() > 0,), lambda x: x, X),
        r"must be a boolean scalar \(got tuple \(tensor\(True\),\)\)",
    ),
    "a body that changes the value": (
        lambda: spmd.while_loop(lambda x: True, lambda x: {"x": x}, X),
        r"the carry that body_fun returns has another structure.*\{'x': f32\[3\]\}, where it gets f32\[3\]",
    ),
    "a body with a result": (
        lambda: spmd.fori_loop(0, 3, lambda i, x: (x, i), X),
        r"the carry that body_fun returns has another structure.*\(f32\[3\], i64\[\]\), where it gets f32\[3\]",
    ),
    "a range of floats": (
        lambda: spmd.fori_loop(0, 3.0, lambda i, x: x, X),  # type: ignore[arg-type]
        r"upper must be an integer or a 0-d tensor of integers \(got float 3.0\)",
    ),
    "a range that ends at many places": (
        lambda: spmd.fori_loop(torch.tensor([0]), 3, lambda i, x: x, X),
        r"lower must be an integer or a 0-d tensor of integers \(got i64\[1\]\)",
    ),
    "a range of two dtypes": (
        lambda: spmd.fori_loop(torch.tensor(0), torch.tensor(3, dtype=torch.int32), lambda i, x: x, X),
        r"lower and upper must have one dtype \(got i64\[\] and i32\[\]\)",
    ),
    "no function for a fori_loop": (
        lambda: spmd.fori_loop(0, 3, None, X),
        r"body_fun must be a function \(got NoneType",
    ),  # type: ignore[arg-type]
    "no function for a cond": (lambda: spmd.cond(True, torch.sin, X, X), r"false_fun must be a function \(got Tensor"),  # type: ignore[arg-type]
    "no predicate": (
        lambda: spmd.cond(None, torch.sin, torch.cos, X),
        r"pred must be a boolean scalar \(got NoneType None\)",
    ),
    "a predicate with dims": (
        lambda: spmd.cond(X > 0, torch.sin, torch.cos, X),
        r"pred must be a boolean scalar \(got b8\[3\]\)\. x.all\(\) or x.any\(\)",
    ),
    "a list for a predicate": (lambda: spmd.cond([True], torch.sin, torch.cos, X), r"\(got list \[True\]\)"),
    "a complex predicate": (lambda: spmd.cond(torch.tensor(1j), torch.sin, torch.cos, X), r"\(got c64\[\]\)"),
    "a predicate without a value": (
        lambda: spmd.cond(torch.ones((), device="meta") > 0, torch.sin, torch.cos, X),
        r"decides by a tensor on the meta device, which has no value",
    ),
    "branches of two shapes": (
        lambda: spmd.cond(True, lambda x: {"a": x}, lambda x: {"a": x[:1]}, X),
        rf"false_fun returns f32\[1\] at \['a'\], and true_fun returns f32\[3\]\. {ALIKE}",
    ),
    "branches of two dtypes": (
        lambda: spmd.cond(True, lambda: 1, lambda: 1.0),
        r"false_fun returns f32\[\], and true_fun returns i64\[\]",
    ),
    "branches of two structures": (
        lambda: spmd.cond(False, lambda x: (x, x), lambda x: x, X),
        r"false_fun returns f32\[3\], and true_fun returns \(f32\[3\], f32\[3\]\)",
    ),
    "branches that differ for examples of a batch": (
        lambda: torch.func.vmap(lambda x: spmd.cond(x > 0, lambda: x, lambda: x[None]))(X),
        r"false_fun returns f32\[1\], and true_fun returns f32\[\]",
    ),
    "text from a branch": (
        lambda: spmd.cond(True, lambda: "a", lambda: "b"),
        r"the result of true_fun must be a tensor",
    ),
    "no branches": (lambda: spmd.switch(0, []), r"branches must be a list of at least one function \(got \[\]\)"),
    "a function for branches": (lambda: spmd.switch(0, torch.sin, X), r"branches must be a list of at least one"),  # type: ignore[arg-type]
    "a branch that is no function": (
        lambda: spmd.switch(0, [torch.sin, X], X),  # type: ignore[list-item]
        r"branches\[1\] must be a function \(got Tensor",
    ),
    "a float for an index": (
        lambda: spmd.switch(torch.tensor(1.0), [torch.sin], X),  # type: ignore[list-item]
        r"index must be an integer or a 0-d tensor of integers \(got f32\[\]\)",
    ),
    "branches of which the third differs": (
        lambda: spmd.switch(0, [torch.sin, torch.cos, torch.sum], X),
        r"branches\[2\] returns f32\[\], and branches\[0\] returns f32\[3\]",
    ),
    "no function for a map": (lambda: spmd.map(None, X), r"f must be a function \(got NoneType None\)"),  # type: ignore[arg-type]
    "a map of a scalar": (
        lambda: spmd.map(torch.sin, torch.tensor(1.0)),
        r"spmd.map at .*: xs has no dim to scan over",
    ),
    "a map of nothing": (lambda: spmd.map(lambda x: x, ()), r"spmd.map at .* has no tensor in xs"),
    "batches of nothing": (
        lambda: spmd.map(torch.sin, X, batch_size=0),
        r"batch_size must be an integer of 1 or more \(got 0\)",
    ),
    "no function for an associative_scan": (lambda: spmd.associative_scan(X, torch.add), r"fn must be a function"),  # type: ignore[arg-type]
    "elements of two lengths": (
        lambda: spmd.associative_scan(lambda a, b: a, (X, ROWS)),
        r"all elems must have the same number of rows in dim 0 \(got: elems\[0\] has 3, elems\[1\] has 2\)",
    ),
    "a dim that there is not": (lambda: spmd.associative_scan(torch.add, X, dim=1), r"elems f32\[3\] has no dim 1"),
    "no elements": (lambda: spmd.associative_scan(torch.add, ()), r"elems has no tensor"),
    "a combination of another shape": (
        lambda: spmd.associative_scan(lambda a, b: (a + b).sum(), X),
        r"fn returns f32\[\], where it gets two of f32\[1\]\. It must return what it gets",
    ),
    "a combination of another structure": (
        lambda: spmd.associative_scan(lambda a, b: (a, b), X),
        r"fn returns \(f32\[1\], f32\[1\]\), where it gets two of f32\[1\]",
    ),
    "a write to the carry": (
        lambda: spmd.scan(lambda c, x: (c.add_(x), None), torch.ones(3), ROWS),
        r"f writes in place to its argument f32\[3\]\. .* write to a copy \(x = x.clone\(\)\), and return it",
    ),
    "a write to a row": (lambda: spmd.map(lambda x: x.mul_(2), torch.ones(2, 3)), r"f writes in place to its argument"),
    "a write in a while_loop": (
        lambda: spmd.while_loop(lambda x: x.sum() < 9, lambda x: x.add_(1), torch.ones(3)),
        r"body_fun writes in place to its argument",
    ),
    "a write in a condition": (
        lambda: spmd.while_loop(lambda x: x.add_(1).sum() < 9, lambda x: x + 1, torch.ones(3)),
        r"cond_fun writes in place to its argument",
    ),
    "a write in a branch": (
        lambda: spmd.cond(X.sum() > 0, lambda x: x.add_(1), lambda x: x, torch.ones(3)),
        r"true_fun writes in place to its argument",
    ),
    "a write to elements": (
        lambda: spmd.associative_scan(lambda a, b: a.add_(b), torch.ones(4)),
        r"fn writes in place to its argument",
    ),
}


@pytest.mark.parametrize(("mistake", "text"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_at_their_line(mistake: Callable[[], Any], text: str) -> None:
    with pytest.raises(spmd.TraceError) as caught:
        mistake()
    message = re.sub(r" \(`.*`\)", "", str(caught.value))  # without the line's code, which holds the expected text
    assert re.search(text, message), message
    lines, first = inspect.getsourcelines(mistake)
    lines_of_it = range(first, first + len(lines))
    named = re.search(r"^spmd\.\w+ at test_control_flow_errors\.py:(\d+)\b", message)
    assert named is not None and int(named[1]) in lines_of_it, message


@pytest.mark.parametrize("name", ["carry of another shape", "no pair", "lengths that differ", "a scalar for xs"])
def test_a_trace_tells_the_same(name: str) -> None:
    mistake, text = MISTAKES[name]
    with pytest.raises(spmd.TraceError, match=text):
        spmd.jit(lambda x: (mistake(), x)[1], P(), P(), mesh=MESH)(X)


def test_what_reads_a_value_in_a_trace_names_the_construct() -> None:
    for function, text in (
        (lambda x: x if x.sum() > 0 else -x, r"spmd\.cond\(condition, f, g, x\) in place of `if`, spmd.while_loop for"),
        (lambda x: next(x for _ in range(x[0].int())), r"spmd\.fori_loop\(0, n, body, x\) for a loop over range\(n\)"),
        (lambda x: [x, -x][x[0].int()], r"spmd\.switch\(i, functions, x\) for a list of them"),
    ):
        with pytest.raises(spmd.TraceError, match=text):
            spmd.jit(function, P(), P(), mesh=MESH)(X)


def test_errors_of_torch_are_its_own() -> None:
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        spmd.scan(lambda c, x: (linear(c), x), X, ROWS)
    assert [] == getattr(caught.value, "__notes__", [])
    assert any(entry.path.name == "linear.py" for entry in caught.traceback)
    with pytest.raises(spmd.TraceError) as refused:
        spmd.scan(lambda c, x: c, X, ROWS)
    assert {"test_control_flow_errors.py"} == {entry.path.name for entry in refused.traceback}
