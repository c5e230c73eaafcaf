import gc
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any, TypeAlias

import hypothesis
import pytest
import torch
from workers import Workers, call_on_mesh

# Deadlines measure the machine, not the code. A failing example is printed as code, so no database of them is kept.
hypothesis.settings.register_profile("suite", deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One folder for the machines that examples and jobs of all test processes measure, in place of the user's."""
    own = tmp_path_factory.getbasetemp()
    os.environ["SPMD_CACHE_DIR"] = str((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def forks() -> ForkServerContext:
    """Starts processes that have imported already what they need.

    The server finds it by PYTHONPATH alone: Python before 3.13 gives it no `sys.path`, and passes over what is missing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "fault_cases", "runtime_cases", "spmd.checkpoint"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


@pytest.fixture(scope="session")
def workers(forks: ForkServerContext) -> Iterator[Workers]:
    with Workers(forks) as started:
        yield started


OnRanks: TypeAlias = Callable[..., list[Any]]
"""`on_ranks(function, axes, *args)`: calls `function(*args, mesh)` on a mesh of these axes, in every process of it."""


@pytest.fixture(params=["virtual", "distributed"])
def on_ranks(request: pytest.FixtureRequest, workers: Workers) -> OnRanks:
    """Runs a test on virtual ranks and on processes; the function must be one that workers can import."""

    def run(function: Callable[..., Any], axes: dict[str, int], *args: Any) -> list[Any]:
        if request.param == "virtual":
            return [call_on_mesh(function, axes, "virtual", *args)]
        return workers.run(call_on_mesh, function, axes, "distributed", *args, ranks=math.prod(axes.values()))

    return run


def pytest_collection_finish() -> None:
    """Let the collector of cycles pass over what is imported, and come less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.hookimpl(trylast=True)  # after the fixtures of the file
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let it pass over what a file of tests leaves behind, too: else each file's collections go through all before."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of what goes wrong several times in a row, as `make test-faults` wants it."""
    runs = int(os.environ.get("SPMD_FAULT_RUNS", "1"))
    if runs > 1 and metafunc.definition.get_closest_marker("faults"):
        metafunc.fixturenames.append("run_number")
        metafunc.parametrize("run_number", range(runs))
