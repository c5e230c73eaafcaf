"""`python -m proofs.hidden_state`: generated functions that read state, some of which is changed between calls.

Each is called beside itself on one device: a result is the same, an error, or warned of, never silently stale; where
nothing that it reads has changed there is no new program and no warning.
"""

from __future__ import annotations

import argparse
import gc
import linecache
import sys
import types
import warnings
from collections import Counter
from typing import Any

import torch

import spmd
from proofs.hidden_state.sources import Case, cases

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")
X = torch.linspace(-1.0, 2.0, 4)
STEPS = (("other", 0), ("change", 2), ("same", 2), ("other", 3), ("change", 4), ("other", 5), ("same", 4))


def run(case: Case, number: int, calls: int = 1) -> list[str]:
    """What is wrong with one function; "warned" where it was warned of."""
    file = f"generated_{number}.py"
    linecache.cache[file] = (len(case.source), None, case.source.splitlines(keepends=True), file)
    module = types.ModuleType(f"generated_{number}")
    module.__file__ = file
    sys.modules[module.__name__] = module
    space = vars(module)
    found: list[str] = []
    try:
        exec(compile(case.source, file, "exec"), space)
        found = _calls(case, space, calls)
    finally:
        del sys.modules[module.__name__]
    return found


def _calls(case: Case, space: dict[str, Any], calls: int) -> list[str]:
    function, jitted = space["f"], spmd.jit(space["f"], mesh=MESH)
    found: list[str] = []
    _compare(function, jitted, "first call", found)
    for kind, value in STEPS:
        statement = getattr(case, kind)
        if statement is None:
            continue
        exec(statement.replace("{v}", str(value)), space)
        before = jitted.cache_info().misses
        given = _compare(function, jitted, f"after {kind}", found)
        if calls > 1 and _grows(jitted, calls):
            found.append("growth")
        if kind != "change" and jitted.cache_info().misses != before:
            found.append(f"a new program after {kind}")
        if kind != "change" and given and not case.limited:
            found.append(f"a warning after {kind}")
    return found


def _grows(jitted: Any, calls: int) -> bool:
    """Whether so many calls leave more objects, or programs, than few."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(10):
            jitted(X)
        gc.collect()
        before = len(gc.get_objects()), jitted.cache_info().currsize
        for _ in range(calls):
            jitted(X)
        gc.collect()
        return len(gc.get_objects()) > before[0] + calls // 100 or jitted.cache_info().currsize > before[1]


def _compare(function: Any, jitted: Any, when: str, found: list[str]) -> bool:
    """Compare a call with one on one device; whether there was a warning."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        result = jitted(X).full_tensor()
    if given:
        found.append("warned")
    expected = function(X)
    if "warned" not in found and not torch.allclose(result, expected.to(result.dtype), equal_nan=True):
        found.append(f"stale {when}")
    return bool(given)


def main() -> int:
    """Run functions, print what is wrong with each, and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=1, help="calls of each function after each change")
    parser.add_argument("--only", default="", help="functions whose name has this text")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for number, case in enumerate(cases(options.seed, 10**6 if options.only else options.count)):
        if options.only not in case.name:
            continue
        try:
            found = run(case, number, options.calls)
        except Exception as error:
            found = [f"error {type(error).__name__}: {str(error)[:200]}"]
        problems = [text for text in dict.fromkeys(found) if text != "warned"]
        counts["functions"] += 1
        counts["warned of"] += "warned" in found
        counts["with problems"] += bool(problems)
        for problem in problems:
            counts[problem.partition(":")[0]] += 1
            print(f"{case.name}: {problem}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if counts["with problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
