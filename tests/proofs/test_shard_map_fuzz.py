"""The fuzz over shard_map programs: its fast part, that its reference is right, and that mutants are found."""

import contextlib
import importlib
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import sample

from proofs.fuzz.outcome import Status
from proofs.fuzz.program import default_dtype
from proofs.shard_map_fuzz.check import HEADER, check_seed, described, script
from proofs.shard_map_fuzz.generate import generate
from proofs.shard_map_fuzz.mutants import FAMILIES, MUTANTS
from proofs.shard_map_fuzz.program import (
    Block,
    Collective,
    Kind,
    Layout,
    Length,
    Local,
    Mode,
    Program,
    Region,
    Transform,
)
from proofs.shard_map_fuzz.reference import run_program
from proofs.shard_map_fuzz.search import search
from proofs.shard_map_fuzz.shrink import shrink

SEEDS = st.integers(0, 10**9)


# `make test-shard-map` runs ten thousand. Of the last two, only zeros pass into a loop in an uneven region, and a
# branch is there for its collective only.
@pytest.mark.parametrize("seed", sample([*range(10), 5509, 60217], range(5)))
def test_programs(seed):
    check_program(seed)


@pytest.mark.slow  # more than a second for each program
@settings(max_examples=40, derandomize=True)
@given(seed=SEEDS)
def test_more_programs(seed):
    check_program(seed)


def check_program(seed):
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


def test_programs_have_uneven_shards():
    outcomes = [described(generate(seed)) for seed in range(300)]
    uneven = [outcome for outcome in outcomes if "uneven" in outcome.operators]
    assert 0.18 < len(uneven) / len(outcomes) < 0.3
    assert 10 < sum("empty" in outcome.operators for outcome in uneven)
    assert {mode.value for mode in Mode} == {outcome.transform for outcome in uneven}
    made = {name for outcome in uneven for name in outcome.operators}
    assert {"partly automatic", "vjp inside", "jvp inside", "vmap inside", "check=False"} <= made
    with default_dtype():
        text = "".join(script(generate(outcome.seed)) for outcome in uneven)
    assert re.search(r"= all_gather\(.*size=\d", text)
    assert re.search(r"= psum_scatter\(.*size=v\d+\.shape\[", text)
    assert re.search(r"= F\.pad\(.* - v\d+\.shape\[", text)
    assert re.search(r"\.narrow\(\d, 0, v\d+\.shape\[", text)


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


def uneven(layout, results, *steps, length=5):
    """A program with one body over x of four ranks, of a global value of 5 elements: 2, 2, 1 and none."""
    mapped = Region(("r",), Block(("b",), steps, results), ("a",), ("x",), (Layout((("x",),)),), (layout,), True)
    return Program(0, Mode.JIT, (("x", 4),), (), Block(("a",), (mapped,), ("r",)), ((length,),), (Layout(((),)),))


def test_the_reference_has_uneven_shards():
    x = torch.arange(5.0)
    rows = Local("s", "s = b * b.shape[0]", ("b",))
    found = run_program(uneven(Layout((("x",),)), ("s",), rows), [x])[0]
    torch.testing.assert_close(found, x * torch.tensor([2, 2, 2, 2, 1]))
    gather = Collective("g", "all_gather", ("b",), ("x",), (("axis", 0), ("tiled", True), ("size", 5)))
    size = (("scatter_dimension", 0), ("tiled", True), ("size", Length(0)))
    scatter = Collective("s", "psum_scatter", ("g",), ("x",), size, ("b",))
    torch.testing.assert_close(run_program(uneven(Layout((("x",),)), ("s",), gather, scatter), [x])[0], 4 * x)


@pytest.mark.parametrize(
    "step",
    [
        Collective("s", "psum", ("b",), ("x",)),
        Collective("s", "ppermute", ("b",), ("x",), (("perm", [(0, 1)]),)),
        Collective("s", "all_gather", ("b",), ("x",), (("axis", 0), ("tiled", True))),
        Collective("s", "all_gather", ("b",), ("x",), (("axis", 0), ("tiled", True), ("size", 6))),
        Local("s", "s = torch.cat([b, b[:1]])", ("b",)),
    ],
)
def test_the_reference_refuses_shapes_that_do_not_fit(step):
    with pytest.raises(ValueError, match="ranks"):
        run_program(uneven(Layout((("x",),)), ("s",), step), [torch.arange(5.0)])


def test_a_failing_program_is_made_shorter():
    name = "transpose of psum"
    with default_dtype():
        seeds = sorted(range(60), key=lambda seed: len(script(generate(seed))))  # short ones are checked in less time
    with MUTANTS[name].applied():
        seed = next(seed for seed in seeds if check_seed(seed).status is Status.WRONG)
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
