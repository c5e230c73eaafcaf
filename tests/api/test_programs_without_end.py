"""What a function does not read makes no new program; what it reads does, and what cannot be compared is said."""

import contextlib
import functools
import gc
import os
import types
import warnings
import weakref

import pytest
import torch

import spmd
from proofs.hidden_state.__main__ import run
from proofs.hidden_state.sources import cases
from spmd import P
from spmd.api import side_effects
from spmd.api.side_effects import HiddenStateWarning, SideEffectWarning

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")
X = torch.linspace(-1.0, 2.0, 4)


@pytest.fixture(autouse=True)
def no_warning_was_given(monkeypatch):
    monkeypatch.setattr(side_effects, "_warned", set())


def at_top_level(source):
    """The namespace of a script after it has run."""
    space = {"torch": torch, "spmd": spmd, "mesh": MESH, "X": X, "types": types, "__name__": "__main__"}
    exec(compile(source, "script.py", "exec"), space)
    return space


SCRIPTS = {
    "mean": "f = spmd.jit(lambda x: x.mean(), mesh=mesh)\nfor _ in range(4):\n    mean = f(X)",
    "std": "f = spmd.jit(lambda x: x.std(), mesh=mesh)\nfor _ in range(4):\n    std = f(X)",
    "softmax": "f = spmd.jit(lambda x: x.softmax(0), mesh=mesh)\nfor _ in range(4):\n    softmax = f(X)",
    "values": "f = spmd.jit(lambda x: x.sort().values, mesh=mesh)\nfor _ in range(4):\n    values = f(X)",
    "grad": "f = spmd.jit(lambda x: torch.func.grad(lambda y: (y * y).sum())(x), mesh=mesh)\n"
    "for _ in range(4):\n    grad = f(X)",
    "params": "f = spmd.jit(lambda p, x: p['params'] * x, mesh=mesh)\n"
    "for _ in range(4):\n    params = f({'params': X}, X)",
    "attribute of another": "cfg = types.SimpleNamespace(scale=2.0)\n"
    "f = spmd.jit(lambda x: x.mean() * cfg.scale, mesh=mesh)\nfor _ in range(4):\n    cfg.mean = f(X)",
    "object again": "f = spmd.jit(lambda x: x * cfg.scale, mesh=mesh)\n"
    "for n in range(4):\n    cfg = types.SimpleNamespace(scale=2.0, seed=n)\n    f(X)",
    "function again": "f = spmd.jit(lambda x: helper(x), mesh=mesh)\n"
    "for n in range(4):\n    def helper(x):\n        return x * 2\n    f(X)",
    "optimizer's state": "w = torch.ones(4, requires_grad=True)\nopt = torch.optim.Adam([w])\n"
    "f = spmd.jit(lambda x: x * opt.param_groups[0]['lr'], mesh=mesh)\n"
    "for _ in range(4):\n    f(X)\n    w.grad = torch.ones(4)\n    opt.step()",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_not_read_makes_no_program(name):
    assert 1 == at_top_level(SCRIPTS[name])["f"].cache_info().misses


def test_generated_functions_are_never_silently_stale():
    for number, case in enumerate(cases(seed=7, count=24)):
        assert (case.name, []) == (case.name, [text for text in run(case, number) if text != "warned"])


@pytest.mark.slow  # 0.1 s each; `python -m proofs.hidden_state` runs all of them
def test_many_generated_functions_are_never_silently_stale():
    for number, case in enumerate(cases(seed=8, count=1000)):
        assert (case.name, []) == (case.name, [text for text in run(case, number) if text != "warned"])


def test_keys_in_a_list_that_the_function_changes_are_followed():
    table = {"a": 1.0, "b": 2.0, "c": 3.0}

    def f(x):
        keys = ["a", "a"]
        keys[1] = "b"
        keys.append("c")
        for key in keys:
            x = x * table[key]
        return x * table[keys[1]]

    jitted = spmd.jit(f, mesh=MESH)
    for key in ("a", "b", "c"):
        torch.testing.assert_close(jitted(X).full_tensor(), f(X))
        table[key] += 1
    torch.testing.assert_close(jitted(X).full_tensor(), f(X))


def test_a_chain_that_a_loop_follows_is_read_to_its_end():
    last = node = types.SimpleNamespace(scale=2.0, next=None)
    for n in range(20):
        node = types.SimpleNamespace(scale=1.0 + n / 10, next=node)
    first = node

    def f(x):
        node = first
        while node is not None:
            x = x * node.scale
            node = node.next
        return x

    jitted = spmd.jit(f, mesh=MESH)
    torch.testing.assert_close(jitted(X).full_tensor(), f(X))
    last.scale = 3.0
    torch.testing.assert_close(jitted(X).full_tensor(), f(X))


def test_an_appended_item_that_is_counted_is_right_and_warned_of():
    log = []

    def f(x):
        log.append(1)
        return x * len(log)

    with pytest.warns(SideEffectWarning, match="changes what the function reads"):
        jitted = spmd.jit(f, mesh=MESH)
        results = [jitted(X).full_tensor() for _ in range(2)]
    torch.testing.assert_close(results, [X, 2 * X])


def test_a_class_attribute_that_becomes_one_of_the_object_is_right():
    class State:
        t = 0

    state = State()

    def f(x):
        state.t += 1
        return x * state.t

    with pytest.warns(SideEffectWarning):
        jitted = spmd.jit(f, mesh=MESH)
        results = [jitted(X).full_tensor() for _ in range(2)]
    torch.testing.assert_close(results, [X, 2 * X])


def test_a_cache_is_filled_once_without_a_warning():
    cache = {}

    def f(x):
        if "scale" not in cache:
            cache["scale"] = 2.0
        return x * cache["scale"]

    jitted = spmd.jit(f, mesh=MESH)
    for _ in range(4):
        torch.testing.assert_close(jitted(X).full_tensor(), 2 * X)
    assert 2 >= jitted.cache_info().misses


def test_what_is_too_large_is_warned_of_at_its_line():
    table = [1.0] * 20_000
    with pytest.warns(HiddenStateWarning, match=r"table is read at .*sum\(table\).*too large"):
        spmd.jit(lambda x: x * sum(table), mesh=MESH)(X)


def test_the_third_program_for_one_reason_is_warned_of_once():
    cfg = types.SimpleNamespace(lr=0.0)
    f = spmd.jit(lambda x: x * cfg.lr, mesh=MESH)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for n in range(8):
            cfg.lr = float(n)
            f(X)
    assert ["cfg.lr is 3.0, and was 2.0" in str(w.message) for w in seen] == [True]


READERS = {
    "value": (torch.ones, "lambda x: x * w.sum()"),
    "gradient": (torch.ones, "lambda x: torch.func.grad(lambda x: (x * w.sum()).sum())(x)"),
    "checkpoint": (torch.ones, "lambda x: torch.func.grad(lambda x: checkpoint(lambda x: (x * w.sum()).sum(), x))(x)"),
    "shard_map": (torch.ones, "lambda x: spmd.shard_map(lambda x: x * w.sum(), in_specs=P(), out_specs=P())(x)"),
    "module": (lambda size: torch.nn.Linear(4, size), "lambda x: w(x).sum()"),
}


@pytest.mark.parametrize("name", READERS)
def test_programs_whose_tensors_are_gone_are_dropped_with_their_copies(name):
    """Also without a collection of cycles, which takes a second where the user has many objects."""
    make, source = READERS[name]
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    space = {"w": make(2000), "torch": torch, "spmd": spmd, "P": P, "checkpoint": checkpoint}
    f = spmd.jit(eval(source, space), mesh=MESH)
    gone = []
    with warnings.catch_warnings(), without_collections():
        warnings.simplefilter("ignore")
        for _ in range(20):
            space["w"] = make(2000)
            gone.append(weakref.ref(space["w"]))
            f(X)
            assert 2 >= f.cache_info().currsize
    assert [None] * 19 == [ref() for ref in gone[:-1]]


@contextlib.contextmanager
def without_collections():
    """A context in which a collection of cycles is an error."""
    collections = []
    count = lambda phase, info: collections.append(info)  # noqa: E731
    gc.disable()
    gc.callbacks.append(count)
    try:
        yield
    finally:
        gc.callbacks.remove(count)
        gc.enable()
    assert [] == collections


def test_small_tensors_are_compared_by_value():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler._scale = torch.full((), 4.0)
    f = spmd.jit(lambda x: x * scaler.get_scale(), mesh=MESH)
    for _ in range(3):
        torch.testing.assert_close(f(X).full_tensor(), 4 * X)
        scaler._scale = torch.full((), 4.0)
    assert 1 == f.cache_info().misses


def test_the_environment_is_read_by_name(monkeypatch):
    monkeypatch.delenv("SPMD_TEST_SCALE", raising=False)
    f = spmd.jit(lambda x: x * float(os.environ.get("SPMD_TEST_SCALE", "1")), mesh=MESH)
    torch.testing.assert_close(f(X).full_tensor(), X)
    monkeypatch.setenv("SPMD_TEST_OTHER", "1")
    torch.testing.assert_close(f(X).full_tensor(), X)
    assert 1 == f.cache_info().misses
    monkeypatch.setenv("SPMD_TEST_SCALE", "3")
    torch.testing.assert_close(f(X).full_tensor(), 3 * X)


def test_library_functions_in_globals_may_be_exchanged():
    space = {"act": torch.sin}
    f = spmd.jit(eval("lambda x: act(x)", space), mesh=MESH)
    torch.testing.assert_close(f(X).full_tensor(), X.sin())
    space["act"] = functools.partial(torch.mul, other=2)
    torch.testing.assert_close(f(X).full_tensor(), 2 * X)


def test_equal_calls_are_followed_once():
    source = "SCALES = {'a': 2.0, 'b': 3.0}\ndef f9(x, pairs, **named):\n    return x * SCALES[named['key']]\n"
    for n in range(8, -1, -1):
        source += f"""
def f{n}(x, pairs, **named):
    sizes = [size for name, size in pairs if name != "key"]
    for each in sizes:
        x = f{n + 1}(x, [(name, size) for name, size in zip("ab", sizes)], **named)
    return f{n + 1}(x, tuple(pairs), key=named["key"]) if len(sizes) > 4 else x
"""
    space = {}
    exec(compile(source, "users_file.py", "exec"), space)
    f = spmd.jit(lambda x: space["f0"](x, [("a", 1)], key="a"), mesh=MESH)
    torch.testing.assert_close(f(X).full_tensor(), 2 * X)
    space["SCALES"]["a"] = 5.0
    torch.testing.assert_close(f(X).full_tensor(), 5 * X)
