import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SLOW = {"02_planning", "03_shard_map", "04_models", "05_values"}
"""Notebooks of more than 10 seconds: a kernel starts, and some plan Llama models or models of transformers."""


NEEDS = {"04_models": "transformers"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package alone, as `pip install .` leaves it: no examples, tests or pages beside it."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "spmd", folder / "spmd", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_notebooks_are_numbered():
    assert [f"{number:02}" for number in range(1, len(NOTEBOOKS) + 1)] == [path.name[:2] for path in NOTEBOOKS]


def test_the_model_of_the_planning_notebook_is_the_examples():
    cells = nbformat.read(ROOT / "notebooks/02_planning.ipynb", as_version=4).cells
    (source,) = [cell.source for cell in cells if cell.source.startswith("%%writefile llama.py\n")]
    assert (ROOT / "examples/llama.py").read_text().strip() == source.partition("\n")[2].strip()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path):
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.id for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else ()) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_notebook_runs_away_from_the_repository(path, installed, tmp_path, monkeypatch):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    monkeypatch.setenv("PYTHONPATH", str(installed))
    notebook = nbformat.read(shutil.copy(path, tmp_path), as_version=4)
    nbformat.validate(notebook)
    notebook.cells.append(nbformat.v4.new_code_cell("print(spmd.__file__)"))
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source)
    assert f"{installed / 'spmd' / '__init__.py'}\n" == notebook.cells[-1].outputs[0].text
