import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import spmd

tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

OPTIONAL = {
    "testing": ("hypothesis",),
    "plan_report.py": ("rich",),
    "progress.py": ("rich",),
    "rich_text.py": ("rich",),
    "picture.py": ("rich",),
    "safetensors_loading.py": ("safetensors",),
}
"""What only one part of the package imports: each has an extra of its own."""


def test_version_is_the_projects():
    assert PROJECT["version"] == spmd.__version__


def test_every_public_name_exists():
    assert [] == [name for name in spmd.__all__ if not hasattr(spmd, name)]


def run_program(program):
    """The lines that a program prints in a fresh interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()


def test_import_brings_in_no_heavy_module_of_torch():
    # How long the import takes is measured in benchmarks/import_time.py.
    imported = "import spmd, spmd.api.programs.stages, spmd.api.values.interop"
    code = f"import torch, sys; before = set(sys.modules); {imported}; print(*(set(sys.modules) - before))"
    (names,) = run_program(code)
    heavy = (
        "torch._dynamo",
        "torch._inductor",
        "torch.testing",
        "torch.distributed.checkpoint",
        "sympy",
        "numpy",
        "rich",
        "safetensors",
        "hypothesis",
        "scipy",
    )
    assert [] == [name for name in names.split() if name.startswith(heavy)]


def test_the_planner_is_imported_at_the_first_plan():
    lines = run_program(
        """
        import sys, torch, spmd
        def seen(): print(*(f"spmd.{name}" in sys.modules for name in ("rules", "plan", "inspect", "lowering.lower")))
        seen()
        print(dir(spmd) == sorted(spmd.__all__))
        double = spmd.jit(lambda x: x + x, spmd.P(), spmd.P(), mesh=spmd.make_mesh({"x": 2}, runtime="virtual"))
        double.trace(torch.ones(2))
        seen()
        double.plan(torch.ones(2))
        seen()
        """
    )
    assert ["False False False False", "True", "False False False False", "True True True True"] == lines


def test_every_public_name_is_there_at_once():
    lines = run_program(
        """
        import spmd
        print(*(name for name in (*spmd.__all__, "inspect", "plan") if not hasattr(spmd, name)))
        from spmd import *
        print(Machine is spmd.Machine, rules.RULES is spmd.rules.RULES)
        """
    )
    assert ["", "True True"] == lines


def test_the_first_plan_imports_nothing_that_depends_on_modes():
    # It may come under a mode of the caller's, such as a default device, which must not change what is imported.
    lines = run_program(
        """
        import torch, spmd
        from torch.overrides import TorchFunctionMode
        from torch.utils._python_dispatch import TorchDispatchMode

        class Functions(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                print(function)
                return function(*args, **(kwargs or {}))

        class Operators(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                print(function)
                return function(*args, **(kwargs or {}))

        with Functions(), Operators():
            import spmd.api.programs.stages, spmd.api.values.interop
        """
    )
    assert [] == lines


def test_the_package_imports_only_what_it_declares():
    allowed = {re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]} | {"spmd"}
    foreign = set()
    for path in (ROOT / "spmd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            roots = {name.partition(".")[0] for name in names}
            permitted = allowed | {name for part in path.parts for name in OPTIONAL.get(part, ())}
            foreign |= {(path.name, root) for root in roots - permitted - sys.stdlib_module_names}
    assert set() == foreign


def test_constraints_pin_every_dependency_exactly():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pin = re.compile(r"[\w.-]+==[\w.]+(; python_version >= \"3\.11\")?")
    assert [] == [line for line in lines if not pin.fullmatch(line)]
    pinned = {re.split("==", line)[0].lower() for line in lines}
    extras = [requirement for group in PROJECT["optional-dependencies"].values() for requirement in group]
    wanted = {re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["dependencies"] + extras}
    assert wanted <= pinned
    assert "torch==2.13.0" in lines


def test_wheel_holds_the_package_and_its_types(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    source = tmp_path / "source"  # a copy: building leaves files beside the sources
    shutil.copytree(ROOT / "spmd", source / "spmd", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*command, "--wheel-dir", tmp_path, source], check=True, env=environment)
    (wheel,) = tmp_path.glob("spmd-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "spmd").rglob("*.py")}
    assert sources | {"spmd/py.typed"} <= names
    assert set() == {name for name in names if not name.startswith(("spmd/", "spmd-"))}
