"""Signatures: which calls share a program, what is static and donated, and that a call checks its arguments once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spmd
import spmd.api.compiled
from spmd import P, TensorMeta
from spmd.api.parameters import Parameters
from spmd.api.programs.options import Options
from spmd.api.signature import CallArguments, Signature, split, with_dynamic

MESH = spmd.make_mesh({"x": 2}, runtime="virtual")
WHOLE = P()


def options(static_argnums: Any = (), donate_argnums: Any = ()) -> Options:
    return Options(static_argnums, donate_argnums, comms="allow", backend="eager", machine=None, rules=None)


def signature(
    *args: Any, static_argnums: Any = (), donate_argnums: Any = (), mesh: spmd.Mesh = MESH, specs: Any = WHOLE
) -> Signature:
    parameters = Parameters(lambda *args: args, options(static_argnums, donate_argnums), specs)
    return Signature.of(CallArguments.of(parameters.layout(args, {}), args, {}), mesh, specs)


def test_a_spec_that_is_not_given_is_part_of_a_signature() -> None:
    x = torch.zeros(4)
    plain, whole, sharded = x, spmd.distribute(x, P(), MESH), spmd.distribute(x, P("x"), MESH)
    assert signature(plain, specs=None) == signature(whole, specs=None) != signature(sharded, specs=None)


def test_values_and_given_specs_are_no_part_of_a_signature() -> None:
    base = signature({"w": torch.zeros(4)}, 3, static_argnums=1)
    same = [torch.ones(4), TensorMeta((4,), torch.float32), spmd.distribute(torch.zeros(4), P("x"), MESH)]
    for leaf in same:
        other = signature({"w": leaf}, 3, static_argnums=-1)
        assert (base, hash(base), base.key) == (other, hash(other), other.key)


@pytest.mark.parametrize(
    "args", [({"w": torch.zeros(5)}, 3), ({"w": torch.zeros(4).double()}, 3), ({"w": 4}, 3)], ids=lambda args: str(args)
)
def test_metas_tell_signatures_apart(args: tuple[Any, ...]) -> None:
    base, other = signature({"w": torch.zeros(4)}, 3, static_argnums=1), signature(*args, static_argnums=1)
    assert base.key == other.key
    assert base != other


def test_what_else_tells_signatures_apart() -> None:
    x = torch.zeros(4)
    found = [signature({"w": x}, 3, static_argnums=1), signature({"w": x}, 3.0, static_argnums=1)]
    found += [signature({"v": x}, 3, static_argnums=1), signature([x], 3, static_argnums=1)]
    found.append(signature({"w": x}, 3, static_argnums=1, mesh=spmd.make_mesh({"y": 2}, runtime="virtual")))
    with torch.autocast("cpu"):
        found.append(signature({"w": x}, 3, static_argnums=1))
    assert len(found) == len(set(found)) == len({(one.key, one.tree) for one in found})


@pytest.mark.parametrize(
    ("static", "positions", "dynamic"),
    [((), [], "abc"), ((1,), [1], "ac"), ((-1, 0), [0, 2], "b"), ((2, -1, 2), [2], "ab"), ((0, 1, 2), [0, 1, 2], "")],
)
def test_arguments_are_split_and_put_together(static: tuple[int, ...], positions: list[int], dynamic: str) -> None:
    layout = Parameters(lambda *args: args, options(static), None).layout("abc", {})
    keys, found = split(tuple("abc"), layout.static)
    assert (positions, tuple(dynamic)) == ([number for number, _ in keys], found)
    replaced = [letter.upper() if letter in dynamic else letter for letter in "abc"]
    assert tuple(replaced) == with_dynamic(tuple("abc"), keys, dynamic.upper())


ARGUMENTS = ({"b": torch.zeros(1), "a": torch.zeros(2)}, "static", None, (torch.zeros(3), [torch.zeros(4)]))


@pytest.mark.parametrize(
    ("donate", "positions"),
    [((), []), ((0,), [0, 1]), ((-1,), [2, 3]), ((2,), []), ((3, 0, -4), [0, 1, 2, 3])],
)
def test_donated_positions_count_the_leaves_of_dynamic_arguments(donate: tuple[int, ...], positions: list[int]) -> None:
    assert frozenset(positions) == signature(*ARGUMENTS, static_argnums=1, donate_argnums=donate).donated


@pytest.mark.parametrize(
    ("donate", "message"),
    [
        ((4,), r"donate_argnums=\(4,\) names argument 4, but the call has 4"),
        ((-3,), r"Argument 1 is static and in donate_argnums=\(-3,\)"),
    ],
)
def test_what_cannot_be_donated(donate: tuple[int, ...], message: str) -> None:
    with pytest.raises(spmd.TraceError, match=message):
        signature(*ARGUMENTS, static_argnums=1, donate_argnums=donate)


def test_a_call_that_lacks_the_donated_argument_is_told_of_the_argument() -> None:
    step = spmd.jit(lambda x, state: (x, state), P(), P(), mesh=MESH, donate_argnums=1)
    with pytest.raises(spmd.TraceError, match="missing a required argument: 'state'"):
        step(torch.zeros(2))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the arguments that are checked, in order."""
    names: list[str] = []
    check = spmd.api.values.arguments.check_argument

    def record(leaf: Any, spec: Any, name: str) -> None:
        names.append(name)
        check(leaf, spec, name)

    monkeypatch.setattr("spmd.api.compiled.check_argument", record)
    return names


def test_a_first_call_checks_each_argument_once(checked: list[str]) -> None:
    add = spmd.jit(lambda x, y: x + y, P("x"), P("x"), mesh=MESH)
    add(torch.zeros(4), torch.zeros(4))
    assert ["argument 0", "argument 1"] == checked
    add(torch.zeros(4), torch.zeros(4))
    assert ["argument 0", "argument 1"] == checked


def test_a_first_call_of_what_is_compiled_checks_each_argument_once(checked: list[str]) -> None:
    double = spmd.jit(lambda x: x + x, P("x"), P("x"), mesh=MESH)
    compiled = double.compile(TensorMeta((4,), torch.float32))
    assert [] == checked
    compiled(torch.zeros(4))
    assert ["argument 0"] == checked


def test_an_argument_that_cannot_be_placed_is_refused_in_the_first_call_and_in_later_ones(checked: list[str]) -> None:
    double = spmd.jit(lambda x: x + x, P("x"), P("x"), mesh=MESH)
    wrong = spmd.distribute(torch.zeros(4), P(), MESH)
    for _ in range(2):
        with pytest.raises(spmd.ShardingError, match=r"argument 0 f32\[4\] has spec P\(\) but in_specs says P\('x'\)"):
            double(wrong)
        double(torch.zeros(4))
    assert 3 == len(checked)


def test_what_is_compiled_for_a_static_argument_refuses_another() -> None:
    scaled = spmd.jit(lambda x, n: x * n, P("x"), P("x"), mesh=MESH, static_argnums=1)
    compiled = scaled.compile(torch.ones(4), 3)
    assert [3.0] * 4 == compiled(torch.ones(4), 3).full_tensor().tolist()
    with pytest.raises(spmd.TraceError, match="was compiled for other static arguments"):
        compiled(torch.ones(4), 4)
