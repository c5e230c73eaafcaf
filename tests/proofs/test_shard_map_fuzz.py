"""The fuzz over shard_map programs: its fast part, that its reference is right, and that mutants are found."""

import contextlib
import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proofs.fuzz.outcome import Status
from proofs.fuzz.program import default_dtype
from proofs.shard_map_fuzz.check import HEADER, check_seed, described, script
from proofs.shard_map_fuzz.generate import generate
from proofs.shard_map_fuzz.mutants import FAMILIES, MUTANTS
from proofs.shard_map_fuzz.program import Block, Collective, Kind, Layout, Local, Mode, Program, Region, Transform
from proofs.shard_map_fuzz.reference import run_program
from proofs.shard_map_fuzz.search import search
from proofs.shard_map_fuzz.shrink import shrink


@settings(max_examples=100, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_programs(seed):
    outcome = check_seed(seed)
    assert outcome.status in (Status.RIGHT, Status.SKIPPED), f"{outcome.message}\n{script(generate(seed))}"


def test_a_seed_is_a_program():
    assert generate(7).definitions() == generate.__wrapped__(7).definitions()
    assert generate(7).definitions() != generate(8).definitions()


def test_programs_have_all_constructs():
    with default_dtype():
        text = "".join(script(generate(seed)) for seed in range(300))
    words = [
        *HEADER.split("import ")[-1].split("\n")[0].split(", "),
        *(f"torch.func.{k.value}(" for k in list(Kind)[:3]),
    ]
    words += ["torch.vmap(", "check=False", "axis_names={'y'}", "to='reduced'", "to='unreduced'", "to='invariant'"]
    assert [] == [word for word in words if word not in text]


def region(*steps, results, operands=("a",), kinds=None):
    """A program with one body over x, of a global value `a` of 4 elements: each rank has 2."""
    block = Block(("b",), steps, results)
    layouts = tuple(Layout((("x",),)) for _ in results) if kinds is None else kinds
    targets = tuple(f"r{index}" for index in range(len(results)))
    mapped = Region(targets, block, operands, ("x",), (Layout((("x",),)),), layouts, True)
    return Program(0, Mode.JIT, (("x", 2),), (), Block(("a",), (mapped,), targets), ((4,),), (Layout(((),)),))


def test_the_reference_counts_an_invariant_loss_once():
    square = Local("s", "s = (c * c).sum()", ("c",))
    total = Collective("t", "psum", ("s",), ("x",))
    of_psum = Transform(("g",), Kind.GRAD, Block(("c",), (square, total), ("t",)), ("b",), ((),), ("x",))
    of_own = Transform(("g",), Kind.GRAD, Block(("c",), (square,), ("s",)), ("b",), ((),), ())
    x = torch.arange(4.0)
    for step in (of_psum, of_own):
        torch.testing.assert_close(run_program(region(step, results=("g",)), [x])[0], 2 * x)


def test_the_reference_shares_the_variable_of_an_invariant_argument():
    total = Collective("t", "psum", ("b",), ("x",))
    product = Local("s", "s = (c * b).sum()", ("c", "b"))
    gradient = Transform(("g",), Kind.GRAD, Block(("c",), (product,), ("s",)), ("t",), (("x",),), ())
    x = torch.arange(4.0)
    found = run_program(region(total, gradient, results=("g",), kinds=(Layout(),)), [x])[0]
    torch.testing.assert_close(found, x.view(2, 2).sum(0))


def test_a_failing_program_is_made_shorter():
    name = "transpose of psum"
    with MUTANTS[name].applied():
        seed = next(seed for seed in range(100) if check_seed(seed).status is Status.WRONG)
        program = shrink(generate(seed))
        assert check_seed(seed, program=program).status is Status.WRONG
    assert len(script(program)) <= len(script(generate(seed)))
    assert check_seed(seed, program=program).status is Status.RIGHT


def test_names_are_distinct():
    assert sum(map(len, FAMILIES.values())) == len(MUTANTS)


@pytest.mark.parametrize("name", MUTANTS)
def test_patches_apply_and_are_undone(name):
    before = check_state(name)
    with contextlib.ExitStack() as stack:
        for patch in MUTANTS[name].patches:
            stack.enter_context(patch.applied())
        changed = check_state(name)
    assert all(new is not old for new, old in zip(changed, before, strict=True))
    assert all(new is old for new, old in zip(check_state(name), before, strict=True))


def check_state(name):
    owners = [importlib.import_module(p.owner) if isinstance(p.owner, str) else p.owner for p in MUTANTS[name].patches]
    return [getattr(owner, patch.name) for owner, patch in zip(owners, MUTANTS[name].patches, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    finding = search(name, [described(generate(seed)) for seed in range(500)])
    assert 0 < finding.programs
    assert check_seed(finding.programs - 1).status is Status.RIGHT
