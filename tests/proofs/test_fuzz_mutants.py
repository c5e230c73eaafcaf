"""The proof of the fuzz: mutants are found, and leave nothing broken behind."""

import contextlib
import importlib
import inspect

import pytest

from proofs.fuzz.check import check_seed
from proofs.fuzz.mutants import FAMILIES, MUTANTS
from proofs.fuzz.mutants.search import find
from proofs.fuzz.outcome import Outcome, Status


def current(patch):
    owner = importlib.import_module(patch.owner) if isinstance(patch.owner, str) else patch.owner
    return inspect.getattr_static(owner, patch.name) if inspect.isclass(owner) else getattr(owner, patch.name)


@pytest.mark.parametrize("name", MUTANTS)
def test_patches_apply_and_are_undone(name):
    mutant = MUTANTS[name]
    before = [current(patch) for patch in mutant.patches]
    with contextlib.ExitStack() as stack:  # without `mutant.applied`, which looks for all caches
        for patch in mutant.patches:
            stack.enter_context(patch.applied())
        changed = [current(patch) for patch in mutant.patches]
    assert mutant.patches and all(new is not old for new, old in zip(changed, before, strict=True))
    assert all(new is old for new, old in zip(map(current, mutant.patches), before, strict=True))


def test_names_are_distinct():
    assert sum(map(len, FAMILIES.values())) == len(MUTANTS)


@pytest.mark.parametrize("name", ["planned: largest block", "all_reduce: last rank"])
def test_a_mutant_is_found(name):
    right = [Outcome(seed, Status.RIGHT, planned=tuple(MUTANTS[name].within)) for seed in range(40)]
    finding = find(MUTANTS[name], right)
    assert 0 < finding.programs
    assert check_seed(finding.programs - 1).status is Status.RIGHT
