"""Types of a user's file (`typed_user.py`), which runs, too."""

import ast
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
import typed_user

import spmd

ROOT = Path(__file__).parents[1]
FILE = Path(typed_user.__file__)
MODULES = (spmd.checkpoint, spmd.collectives, spmd.debug, spmd.optim, spmd.random, spmd.rules)
CONFIG = """
[mypy]
strict = True
disallow_any_expr = True
[mypy-spmd.*,torch.*,optree.*]
follow_imports = silent
"""


def public(module):
    """The public names of a module, each with what it is."""
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    names = getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]
    return {f"{module.__name__}.{name}": getattr(module, name) for name in names}


NAMES = {name: value for module in (spmd, *MODULES) for name, value in public(module).items()}


def used(tree):
    """The names of `spmd` and its modules that a file uses, in full."""
    imports = {"spmd": "spmd"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("spmd"):
            imports |= {alias.name: f"{node.module}.{alias.name}" for alias in node.names} | {node.module: node.module}
    yield from imports.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imports:
            yield f"{imports[node.value.id]}.{node.attr}"


def test_the_file_uses_every_public_name():
    assert set() == NAMES.keys() - set(used(ast.parse(FILE.read_text())))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads")
def test_no_public_function_returns_any():
    functions = {name: value for name, value in NAMES.items() if inspect.isfunction(value)}
    returned = {
        name: str(inspect.signature(each).return_annotation)
        for name, function in functions.items()
        for each in typing.get_overloads(function) or [function]
    }
    assert len(returned) > 80
    assert {} == {name: text for name, text in returned.items() if re.search(r"\bAny\b|_empty", text)}


def test_the_file_runs(tmp_path, capsys):
    params, x = {"w": torch.ones(4, 6), "b": torch.ones(6)}, torch.ones(8, 4)
    assert isinstance(typed_user.functions(params, x), spmd.DTensor)
    typed_user.per_rank(x, torch.ones(4, 6))
    typed_user.values(params, x, torch.nn.Linear(4, 6))
    assert typed_user.loops(x).shape == x.shape
    typed_user.layouts(torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)), params)
    typed_user.from_host(torch.ones(4))
    assert typed_user.draws(0, torch.ones(4, 6)).shape == (4, 6)
    torch.testing.assert_close(typed_user.optimizers(params, params)["b"], torch.full((6,), 1 - 1e-3))
    torch.testing.assert_close(typed_user.checkpoints(tmp_path / "saved", params), params)
    typed_user.plans(params, x, tmp_path / "plan.json")
    assert typed_user.own_rules(torch.ones(4)).shape == (4, 4)


@pytest.mark.slow
def test_type_checkers_find_no_error_and_no_any(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(CONFIG)
    (tmp_path / "user.py").write_text(FILE.read_text())
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "user.py"]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "Success: no issues found in 1 source file\n" == done.stdout + done.stderr
