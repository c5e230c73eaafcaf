import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from workers import Workers

# Deadlines measure the machine, not the code. A failing example is printed as code, so no database of them is kept.
hypothesis.settings.register_profile("suite", deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    with Workers() as started:
        yield started


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of what goes wrong several times in a row, as `make test-faults` wants it."""
    runs = int(os.environ.get("SPMD_FAULT_RUNS", "1"))
    if runs > 1 and metafunc.definition.get_closest_marker("faults"):
        metafunc.fixturenames.append("run_number")
        metafunc.parametrize("run_number", range(runs))
