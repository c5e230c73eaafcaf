"""What functions under jit read beside their arguments, changed between calls; and what they do beside results."""

import argparse
import collections
import contextvars
import dataclasses
import functools
import itertools
import logging
import random
import sys
import types

import attrs
import numpy
import pytest
import torch
from torch import nn

import spmd
from spmd import P
from spmd.api import side_effects
from spmd.api.side_effects import SideEffectWarning
from spmd.errors import TraceError

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_warning_was_given(monkeypatch):
    monkeypatch.setattr(side_effects, "_warned", set())


SCALE, FLAG, TABLE, WEIGHT = 2.0, True, {"by": 3}, torch.ones(4)
COUNT = 0


class Settings:
    """A namespace with nested values."""

    def __init__(self):
        self.scale, self.shifts, self.inner = 2.0, [1.0, 2.0], types.SimpleNamespace(flag=True)


SETTINGS = Settings()


def helper(x):
    return x * SCALE + (1 if FLAG else 0)


class Base:
    """What a class inherits."""

    shift = 1.0

    def scaled(self, x):
        return x * self.scale + self.shift


class Derived(Base):
    def __init__(self):
        self._scale = 2.0

    @property
    def scale(self):
        return self._scale

    def __getitem__(self, name):
        return self._scale if name == "scale" else None

    @classmethod
    def shifted(cls, x):
        return x + cls.shift


@attrs.define
class Slotted:
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class SlottedFields:
    scale: float = 2.0


class Helped(nn.Module):
    """A module whose `forward` calls a method of its own."""

    def forward(self, x):
        return self.scaled(x)

    def scaled(self, x):
        return x * SCALE


def change_scale(settings):
    def change():
        settings.scale += 1

    return change


class Functions:
    """Functions that read something, and a change of it."""

    @staticmethod
    def global_float():
        return lambda x: x * SCALE, lambda: globals().update(SCALE=SCALE + 1)

    @staticmethod
    def global_flag_of_a_helper():
        return lambda x: helper(x), lambda: globals().update(FLAG=not FLAG)

    @staticmethod
    def global_dict():
        return lambda x: x * TABLE["by"], lambda: TABLE.update(by=TABLE["by"] + 1)

    @staticmethod
    def global_tensor_rebound():
        return lambda x: x * WEIGHT, lambda: globals().update(WEIGHT=WEIGHT + 1)

    @staticmethod
    def global_tensor_written():
        return lambda x: x * WEIGHT, lambda: WEIGHT.mul_(3)

    @staticmethod
    def closure_int():
        n = 2

        def change():
            nonlocal n
            n += 1

        return lambda x: x**n, change

    @staticmethod
    def closure_list():
        items = [1.0]
        return lambda x: x + sum(items), lambda: items.append(5.0)

    @staticmethod
    def attribute():
        settings = Settings()

        def change():
            settings.scale = 5.0

        return lambda x: x * settings.scale, change

    @staticmethod
    def attribute_of_an_attribute():
        settings = Settings()

        def change():
            settings.inner = types.SimpleNamespace(flag=False)

        return lambda x: x if settings.inner.flag else -x, change

    @staticmethod
    def list_in_an_attribute():
        settings = Settings()
        return lambda x: x + sum(settings.shifts), lambda: settings.shifts.append(9.0)

    @staticmethod
    def attribute_of_a_global():
        def change():
            SETTINGS.scale += 1

        return lambda x: x * SETTINGS.scale, change

    @staticmethod
    def partial_of_an_object():
        settings = Settings()

        def change():
            settings.scale = 7.0

        return functools.partial(lambda settings, x: x * settings.scale, settings), change

    @staticmethod
    def module_evaluates():
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0))
        return lambda x: model(x), model.eval

    @staticmethod
    def module_parameter_rebound():
        model = nn.Linear(4, 4)

        def change():
            model.weight = nn.Parameter(torch.ones(4, 4))

        return lambda x: model(x), change

    @staticmethod
    def module_parameter_written():
        model = nn.Linear(4, 4)

        def change():
            with torch.no_grad():
                model.weight.mul_(2)

        return lambda x: model(x), change

    @staticmethod
    def function_rebound():
        def one(x):
            return x + 1

        chosen = one

        def change():
            nonlocal chosen
            chosen = lambda x: x - 1  # noqa: E731

        return lambda x: chosen(x), change

    @staticmethod
    def argparse_namespace():
        args = argparse.Namespace(scale=2.0)
        return lambda x: x * args.scale, change_scale(args)

    @staticmethod
    def simple_namespace():
        args = types.SimpleNamespace(inner=types.SimpleNamespace(scale=2.0))
        return lambda x: x * args.inner.scale, change_scale(args.inner)

    @staticmethod
    def slots():
        settings = Slotted()
        return lambda x: x * settings.scale, change_scale(settings)

    @staticmethod
    def slots_of_a_dataclass():
        settings = SlottedFields()
        return lambda x: x * settings.scale, change_scale(settings)

    @staticmethod
    def property_of_a_base_class():
        settings = Derived()

        def change():
            settings._scale = 5.0

        return lambda x: settings.scaled(x), change

    @staticmethod
    def attribute_of_a_base_class():
        settings = Derived()

        def change():
            Base.shift += 1

        return lambda x: settings.scaled(x), change

    @staticmethod
    def attribute_in_a_class_method():
        def change():
            Base.shift += 1

        return lambda x: Derived.shifted(x), change

    @staticmethod
    def special_method():
        settings = Derived()

        def change():
            settings._scale = 5.0

        return lambda x: x * settings["scale"], change

    @staticmethod
    def ordered_dict():
        table = collections.OrderedDict(scale=2.0)
        return lambda x: x * table["scale"], lambda: table.update(scale=3.0)

    @staticmethod
    def default_dict():
        table = collections.defaultdict(float, scale=2.0)
        return lambda x: x * table["scale"], lambda: table.update(scale=3.0)

    @staticmethod
    def user_dict():
        table = collections.UserDict(scale=2.0)
        return lambda x: x * table["scale"], lambda: table.update(scale=3.0)

    @staticmethod
    def queue():
        items = collections.deque([2.0, 3.0])
        return lambda x: x * items[0], items.popleft

    @staticmethod
    def set_of_names():
        names = {"bias"}
        return lambda x: x * (2 if "scale" in names else 1), lambda: names.add("scale")

    @staticmethod
    def array_written():
        factors = numpy.array([2.0, 3.0])

        def change():
            factors[0] = 5.0

        return lambda x: x * float(factors[0]), change

    @staticmethod
    def method_of_a_module():
        model = Helped()
        return lambda x: model(x), lambda: globals().update(SCALE=SCALE + 1)

    @staticmethod
    def cached_method_of_a_module():
        model = Caching()

        def change():
            globals().update(SCALE=SCALE + 1)
            Caching.scale.cache_clear()

        return lambda x: model(x), change

    @staticmethod
    def variable_of_the_context():
        variable = contextvars.ContextVar("scale", default=2.0)
        return lambda x: x * variable.get(), lambda: variable.set(3.0)

    @staticmethod
    def object_in_a_variable_of_the_context():
        variable = contextvars.ContextVar("settings")
        variable.set(settings := types.SimpleNamespace(scale=2.0))
        return lambda x: x * variable.get().scale, change_scale(settings)

    @staticmethod
    def variable_of_the_context_without_a_value():
        variable = contextvars.ContextVar("scale")
        return lambda x: x * variable.get(2.0), lambda: variable.set(3.0)

    @staticmethod
    def hook_of_a_module():
        model, scale = nn.Linear(4, 4), 2.0

        def change():
            nonlocal scale
            scale = 3.0

        model.register_forward_hook(lambda module, args, result: result * scale)
        return lambda x: model(x), change

    @staticmethod
    def nested_jit():
        n = 2.0
        inner = spmd.jit(lambda x: x * n, mesh=MESH)

        def change():
            nonlocal n
            n = 4.0

        return lambda x: inner(x) + 1, change


class Caching(nn.Module):
    """A module with a method that keeps its results."""

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def scale(self):
        return SCALE

    def forward(self, x):
        return x * self.scale()


CASES = [name for name in vars(Functions) if not name.startswith("_")]


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_seen(case):
    function, change = getattr(Functions, case)()
    f = spmd.jit(function, P("data"), mesh=MESH)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(f(X).full_tensor(), f.__wrapped__(X))
        before = f(X).full_tensor()
        assert 1 == f.cache_info().currsize
        change()
        expected = function(X) if case != "nested_jit" else X * 4 + 1
        for _ in range(2):
            torch.testing.assert_close(f(X).full_tensor(), getattr(expected, "full_tensor", lambda: expected)())
        assert not torch.equal(before, f(X).full_tensor())


def test_modules_of_a_notebook_have_no_file(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    model = type("Interactive", (Helped,), {"__module__": "__main__"})()
    closed_over, called = spmd.jit(lambda x: model(x), mesh=MESH), spmd.jit(model, mesh=MESH)
    for _ in range(2):
        torch.testing.assert_close(closed_over(X).full_tensor(), model(X))
        torch.testing.assert_close(called(X).full_tensor(), model(X))


def test_earlier_values_find_their_programs():
    settings = Settings()
    f = spmd.jit(lambda x: x * settings.scale, mesh=MESH)
    for scale in (1.0, 2.0, 1.0, 2.0, 1.0):
        settings.scale = scale
        torch.testing.assert_close(f(X).full_tensor(), X * scale)
    assert 2 == f.cache_info().currsize


def test_writes_to_a_closed_over_tensor_keep_one_program():
    weight = torch.ones(4)
    f = spmd.jit(lambda x: x * weight, mesh=MESH)
    with pytest.warns(UserWarning, match="compiled again for the third time, as weight was another tensor") as seen:
        for _ in range(6):
            torch.testing.assert_close(f(X).full_tensor(), X * weight)
            weight.add_(1)
    assert 1 == len(seen)
    assert 1 == f.cache_info().currsize


def test_the_log_names_what_has_changed(caplog):
    settings = Settings()
    f = spmd.jit(lambda x: x * settings.scale, mesh=MESH)
    f(X)
    settings.scale = 5.0
    with spmd.log_compiles(), caplog.at_level(logging.WARNING, "spmd"):
        f(X)
    assert "settings.scale is 5.0, and was 2.0" in caplog.text


def test_a_list_that_only_the_trace_appends_to_makes_no_more_traces():
    traces = []

    def f(x):
        traces.append(1)
        return x + 1

    jitted = spmd.jit(f, mesh=MESH)
    for x in (X, X[:4], X, X[:4], X):
        torch.testing.assert_close(jitted(x).full_tensor(), x + 1)
    assert 2 == len(traces)


class Counter:
    def __init__(self):
        self.t = 0

    @spmd.jit(mesh=MESH)
    def step(self, x):
        self.t += 1
        return x * self.t

    @spmd.jit(mesh=MESH)
    def keep(self, x):
        self.kept = x * 2
        return x


def test_a_counter_in_an_attribute_warns_and_is_right():
    counter = Counter()
    with pytest.warns(
        SideEffectWarning, match=r"self\.t = \.\.\. at .*test_hidden_state.py:\d+ \(`self\.t \+= 1`\)"
    ) as seen:
        torch.testing.assert_close(counter.step(X).full_tensor(), X)
    assert 1 == len(seen)
    assert torch.equal(Counter().step(X).full_tensor(), X)  # the same warning is given once
    with pytest.warns(SideEffectWarning):
        for n in (2, 3):
            torch.testing.assert_close(counter.step(X).full_tensor(), n * X)


class CountingModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = 0

    def forward(self, x):
        self.t += 1
        return x * self.t


@pytest.mark.parametrize("form", ["argument", "function", "closed over"])
def test_a_counter_in_a_module_warns_and_is_right(form):
    model = CountingModule()
    taken = spmd.jit(lambda m, x: m(x), mesh=MESH)
    closed_over = spmd.jit(lambda x: model(x), mesh=MESH)
    f = {"argument": lambda x: taken(model, x), "function": spmd.jit(model, mesh=MESH), "closed over": closed_over}[
        form
    ]
    with pytest.warns(SideEffectWarning, match=r"t = \.\.\. at .*self\.t \+= 1"):
        for n in (1, 2, 3):
            torch.testing.assert_close(f(X).full_tensor(), n * X)


def count_globally(x):
    global COUNT
    COUNT += 1
    return x * COUNT


def test_a_global_counter_warns_and_is_right():
    f = spmd.jit(count_globally, mesh=MESH)
    with pytest.warns(SideEffectWarning, match=r"COUNT = \.\.\. at .*COUNT \+= 1"):
        for n in (1, 2):
            torch.testing.assert_close(f(X).full_tensor(), n * X)


def test_kept_traced_tensors_warn_at_the_line():
    kept = []

    def f(x):
        kept.append(x * 2)
        return x

    with pytest.warns(
        SideEffectWarning, match=r"A traced tensor, which has no value, was put into kept at .*kept\.append"
    ):
        torch.testing.assert_close(spmd.jit(f, mesh=MESH)(X).full_tensor(), X)
    counter = Counter()
    with pytest.warns(SideEffectWarning, match=r"self\.kept = \.\.\. at .*self\.kept = x \* 2.* keeps a traced tensor"):
        counter.keep(X)


@pytest.mark.parametrize(
    "make",
    [dict, collections.OrderedDict, lambda: collections.defaultdict(list), lambda: {"inner": {}}],
    ids=["dict", "OrderedDict", "defaultdict", "nested"],
)
def test_traced_tensors_that_are_kept_by_name_warn(make):
    table = make()

    def f(x):
        table.get("inner", table)["hidden"] = x * 2
        return x

    with pytest.warns(SideEffectWarning, match=r"A traced tensor.* was put into table.* at .*table\.get"):
        spmd.jit(f, mesh=MESH)(X)


@pytest.mark.parametrize(("make", "put"), [(set, "add"), (collections.deque, "append"), (list, "append")])
def test_traced_tensors_that_are_kept_in_a_row_warn(make, put):
    kept = make()

    def f(x):
        getattr(kept, put)(x * 2)
        return x

    with pytest.warns(SideEffectWarning, match=r"A traced tensor.* was put into kept at .*getattr\(kept, put\)"):
        spmd.jit(f, mesh=MESH)(X)
    assert 1 == len(kept)


def test_traced_tensors_that_a_hook_keeps_warn():
    model, activations = nn.Linear(4, 4), []
    model.register_forward_hook(lambda module, args, result: activations.append(result))
    with torch.no_grad(), pytest.warns(SideEffectWarning, match=r"put into activations at .*activations\.append"):
        torch.testing.assert_close(spmd.jit(model, mesh=MESH)(X).full_tensor(), model(X))


GENERATOR, DICE = numpy.random.default_rng(0), random.Random(0)

DRAWS = {
    "random": lambda x: x + random.random(),
    "numpy": lambda x: x + numpy.random.rand(),
    "generator": lambda x: x + GENERATOR.random(),
    "Random": lambda x: x * DICE.choice([1, 2]),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_python_warn(name):
    line = r"Random numbers of Python or NumPy are drawn at .*x [+*] (random|numpy|GENERATOR|DICE)\."
    with pytest.warns(SideEffectWarning, match=line):
        spmd.jit(DRAWS[name], mesh=MESH)(X)


@pytest.mark.parametrize("make", [lambda: iter([2.0, 3.0]), itertools.count, lambda: (x for x in (2.0, 3.0))])
def test_items_of_an_iterator_warn(make):
    batches = make()

    def f(x):
        return x * next(batches)

    with pytest.warns(SideEffectWarning, match=r"The iterator batches at .*next\(batches\).* every call has the same"):
        spmd.jit(f, mesh=MESH)(X)


def test_a_seed_inside_is_refused():
    def f(x):
        torch.manual_seed(0)
        return x + 1

    with pytest.raises(TraceError, match=r"torch\.manual_seed before a call"):
        spmd.jit(f, mesh=MESH)(X)
