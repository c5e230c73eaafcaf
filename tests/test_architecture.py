"""The architecture of DESIGN.md: folders import downward only, and no modules import each other in a circle."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import spmd

ROOT = Path(spmd.__file__).parent

ROOMS = (
    "errors",
    "job",
    "core",
    "ir",
    "collectives.transport",
    "collectives",
    "collectives.distributed",
    "random.generators",
    "rules",
    "rules.ops",
    "tracing",
    "tracing.canonicalize",
    "tracing.manual",
    "tracing.loops",
    "plan.machine",
    "plan.data",
    "plan.local",
    "lowering.passes",
    "lowering",
    "plan.solver",
    "plan.cost",
    "plan.memory",
    "plan.schedule",
    "plan.search",
    "plan",
    "inspect.layers",
    "inspect.saving",
    "inspect.report",
    "inspect.questions",
    "inspect",
    "runtime",
    "api.values",
    "api.model_specs",
    "api.programs",
    "api.transforms",
    "api.uncompiled",
    "api.eager",
    "api.control_flow",
    "api",
    "random",
    "debug",
    "checkpoint",
    "optim",
    "plan_report",
    "testing",
)
"""Lowest first: folders, and modules directly below `spmd`. A folder that is not named belongs to the one above it."""

ORDER = {name: number for number, name in enumerate(ROOMS)}


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(source, modules):
    """The modules of this package that a source imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full: from spmd.core.mesh import Mesh"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in modules else node.module)
    return found & set(modules)


def room(name):
    """The folder or top module that a module belongs to."""
    parts = name.split(".")[1:]
    for count in range(len(parts), 0, -1):
        if ".".join(parts[:count]) in ORDER:
            return ".".join(parts[:count])
    return None


def rank(name, imports):
    """The place of a module in the order; a package that gives out names of its subfolders stands above them."""
    own = ORDER[room(name)]
    if MODULES[name].name != "__init__.py":
        return own
    return max([own, *(ORDER[room(other)] for other in imports[name] if other.startswith(f"{name}."))])


def upward(name, imports):
    """The imports of a module that lie in a room above its own."""
    own = rank(name, imports)
    return sorted(other for other in imports[name] if other == "spmd" or rank(other, imports) > own)


IMPORTS = {name: imported(path.read_text(), MODULES) for name, path in MODULES.items()}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "spmd"])
def test_imports_go_down(name):
    assert room(name), f"give {name} a place here and in the design"
    assert [] == upward(name, IMPORTS)


def test_no_modules_import_each_other_in_a_circle():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_few_modules_stand_at_the_top():
    assert 4 >= len([path for path in ROOT.glob("*.py") if path.name != "__init__.py"])


def test_violations_are_seen():
    modules = {"spmd", "spmd.core.mesh", "spmd.errors", "spmd.api.jit", "spmd.plan", "spmd.plan.data.plan"}
    source = "import spmd.api.jit\nfrom spmd.plan import plan\ndef f():\n    from spmd.errors import MeshError\n"
    found = imported(source, modules)
    assert {"spmd.api.jit", "spmd.plan", "spmd.errors"} == found

    def up(name, imports):
        return upward(name, {**IMPORTS, name: imports})

    assert ["spmd.api.jit", "spmd.plan"] == up("spmd.core.mesh", found)
    assert [] == up("spmd.api.jit", found)
    assert ["spmd"] == up("spmd.api.jit", {"spmd"})
    assert ["spmd.tracing.canonicalize.canonicalize"] == up(
        "spmd.tracing.trace", {"spmd.tracing.canonicalize.canonicalize", "spmd.tracing.recorder"}
    )


def test_no_two_classes_share_a_name():
    names = {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, set()).add(name)
    assert {} == {name: homes for name, homes in names.items() if len(homes) > 1}
