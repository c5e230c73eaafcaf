"""The architecture of DESIGN.md: imports go down the layers, and no modules import each other in a circle."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import spmd

ROOT = Path(spmd.__file__).parent

LAYERS = (
    ("ambient", "documents", "errors", "torch_state", "undisturbed", "user_file"),
    ("alarm", "meeting", "process", "mesh", "placement"),
    ("spec", "tree"),
    ("collectives",),
    ("rules",),
    (
        "as_strided",
        "assignments",
        "overlapping",
        "draws",
        "effects",
        "graph",
        "source",
        "recorder",
        "differentiable",
        "nested_tracers",
        "trace",
        "canonicalize",
        "normal_forms",
        "foreach",
        "functionalization",
        "strides",
        "fused",
        "decompositions",
        "fills",
        "constrain",
        "atoms",
    ),
    ("plan",),
    ("lower", "optimize", "program", "text"),
    ("runtime",),
    ("chunks", "dtensor", "distribute", "kept", "options", "static", "compiled", "jit", "shard_map"),
    ("random", "optim", "checkpoint", "interop", "launch", "nn", "plan_report", "testing"),
)
"""Lowest first; each entry is a module or a package directly below `spmd`."""

LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}


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


def upward(name, imports):
    """The imports of a module that lie in a layer above its own; a command may use anything."""
    if name.endswith(".__main__"):
        return []
    own = LAYER[name.split(".")[1]]
    return sorted(other for other in imports if other == "spmd" or LAYER[other.split(".")[1]] > own)


IMPORTS = {name: imported(path.read_text(), MODULES) for name, path in MODULES.items()}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "spmd"])
def test_imports_go_down(name):
    assert name.split(".")[1] in LAYER, f"give {name} a layer here and in the design"
    assert [] == upward(name, IMPORTS[name])


def test_no_modules_import_each_other_in_a_circle():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_violations_are_seen():
    modules = {"spmd", "spmd.core.mesh", "spmd.errors", "spmd.api.jit", "spmd.plan", "spmd.plan.plan"}
    source = "import spmd.jit\nfrom spmd.plan import plan, other\ndef f():\n    from spmd.errors import MeshError\n"
    found = imported(source, modules)
    assert {"spmd.api.jit", "spmd.plan.plan", "spmd.plan", "spmd.errors"} == found
    assert ["spmd.api.jit", "spmd.plan", "spmd.plan.plan"] == upward("spmd.core.mesh", found)
    assert [] == upward("spmd.api.jit", found)
    assert ["spmd"] == upward("spmd.api.jit", imported("import spmd", modules))
    assert [] == upward("spmd.rules.check.__main__", {"spmd.testing.rule_check.command"})


def test_nothing_imports_a_command():
    assert [] == [name for name, imports in IMPORTS.items() if any(other.endswith("__main__") for other in imports)]
