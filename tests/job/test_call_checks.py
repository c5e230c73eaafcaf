"""Ranks that part after their first calls: all of them say how, with `init(check="calls")` before the call runs."""

import re

import call_cases as cases
import pytest

from spmd.errors import MeshError
from spmd.job import checks

pytestmark = pytest.mark.faults

RANKS = 4
LINE = r"call_cases\.py:\d+"


def in_call(name, message):
    return rf"In call \d+ of jitted functions, {name} on Mesh\(data=2, model=2\), at {LINE}: {message}"


def other_calls(mine, on_rank_1):
    return (
        rf"Ranks make different calls: .*{mine} on .* on ranks 0, 2, 3; .*{on_rank_1}.* on rank 1\. They are at {LINE}"
    )


LATER = {
    "functions": other_calls(", step", ", evaluate"),
    "closures": in_call(
        "<lambda>", r"The function of the name <lambda> differs between ranks: number \d+ on ranks 0, 2"
    ),
    "static argument": in_call("power", "Static argument 1 differs between ranks: 2 on ranks 0, 2, 3; 3 on rank 1"),
    "number": in_call(
        "<lambda>", r"Argument 1 differs between ranks: the number 3.0 on ranks 0, 2, 3; the number 2.0 on rank 1"
    ),
    "skipped": other_calls(", step", ", evaluate"),
    "last skipped": other_calls(", step", r"full_tensor\(\) of"),
    "plain": in_call(
        "step", r"Argument 1 differs between ranks: f32\[8\] with digest \w+ on ranks 0, 2, 3; .* on rank 1"
    ),
    "sharded plain": in_call("step", "Argument 0 differs between ranks: .* on rank 1. Every rank must pass the same"),
    "replica": in_call("step", "Argument 1 differs between ranks: .* on ranks 0, 2, 3; .* on rank 1"),
    "replica along an axis": in_call(
        "step", "Argument 0 differs between ranks, which differ only along model: .* on rank 0; .* on rank 1"
    ),
    "generator": in_call("dropped", "The random generator before dropped differs between ranks: .* on rank 1"),
    "shape": in_call("step", r"Argument 0 differs between ranks: a plain f32\[8\] on ranks 0, 2, 3; a plain f32\[7\]"),
    "no data": in_call("step", r"Argument 0 differs between ranks: .*; a plain f32\[8\] without data on rank 1"),
    "spec": in_call("step", r"Argument 0 differs between ranks: f32\[8\] P\('data'\) on .*; f32\[8\] P\(\) on rank 1"),
    "settings": in_call("step", "What torch is set to .* differs between ranks"),
    "gradient": other_calls(", step", ", evaluate"),
    "compiled": other_calls(", step", ", evaluate"),
    "local": r"In DTensor\.from_local\(.*: the tensor differs between ranks, which differ only along model: ",
    "other check": "Ranks check different calls: check is 'calls' on ranks 0, 2, 3; 'first' on rank 1",
}

RAN = {"number": 2, "skipped": 2, "last skipped": 2, "generator": 1, "gradient": 1}
"""How many calls ran before the error, where some did."""


@pytest.mark.parametrize("name", LATER)
def test_calls_that_part_are_told_before_they_run(workers, name):
    (message, count), *rest = workers.run(cases.diverge, name, "calls", ranks=RANKS)
    assert [(message, count)] * 3 == rest
    assert re.match(f"DivergenceError: {LATER[name]}", message), message
    assert RAN.get(name, 0) == count


LOADED = rf"In from_process_data\(.*, at {LINE}: leaf"

ALWAYS = {
    "loaded": LOADED + r" \['w'\] differs between ranks: f32\[8\] with digest \w+ on ranks 0, 2, 3; .* on rank 1",
    "loaded along an axis": LOADED + " differs between ranks, which differ only along model: .* on rank 1",
    "order": rf"Ranks have run different programs: run \d+ is of <lambda> at {LINE}, program "
    rf"\d+ on ranks 0, 2, 3; <lambda> at {LINE}, program \d+ on rank 1\. They are at {LINE}\. They were "
    r"compared in full_tensor\(\)",
    "number first": r"argument 1 differs between ranks: 3\.0 on ranks 0, 2, 3; 2\.0 on rank 1",
}


@pytest.mark.parametrize("name", ALWAYS)
def test_what_parts_is_told_without_the_mode(workers, name):
    (message, count), *rest = workers.run(cases.diverge, name, "first", ranks=RANKS)
    assert [(message, count)] * 3 == rest
    assert re.match(f"DivergenceError: {ALWAYS[name]}", message), message


def test_every_case_is_tested():
    assert (cases.LATER.keys(), cases.ALWAYS.keys()) == (LATER.keys(), ALWAYS.keys())


@pytest.fixture
def unchosen(monkeypatch):
    monkeypatch.setattr(checks, "every_call", False)
    monkeypatch.setattr(checks, "_is_given", False)
    monkeypatch.delenv(checks.VARIABLE, raising=False)
    return monkeypatch


def test_the_variable_is_for_those_who_are_not_told(unchosen):
    checks.choose(None)
    assert not checks.every_call
    unchosen.setenv(checks.VARIABLE, "calls")
    checks.choose(None)
    assert checks.every_call
    checks.choose("first")
    checks.choose(None)
    assert not checks.every_call


def test_other_checks_are_refused(unchosen):
    with pytest.raises(MeshError, match=r"check must be 'first' or 'calls' \(got 'all'\)"):
        checks.choose("all")
    unchosen.setenv(checks.VARIABLE, "1")
    with pytest.raises(MeshError, match=r"The environment variable SPMD_CHECK must be 'first' or 'calls' \(got '1'\)"):
        checks.choose(None)
