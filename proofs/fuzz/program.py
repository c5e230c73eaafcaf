"""A program as data, and as Python source that can be pasted and run."""

from __future__ import annotations

import functools
import linecache
from types import MappingProxyType
from typing import Any

import attrs
import torch

from proofs.fuzz.environment import SEED, names
from proofs.fuzz.tensors import Kind, Recipe
from proofs.fuzz.transforms import Transform
from spmd.core.mesh import Mesh, make_mesh
from spmd.core.spec import P

AXES = ("data", "model", "pipe")
"""The names of mesh axes, in mesh order."""

MACHINES = ("", "machine=spmd.Machine(flops=1e9, memory_bandwidth=1e8, latency=0.0), ")
"""The `machine=` argument of `spmd.jit`: a machine on which small tensors are best replicated, or best sharded."""


@attrs.frozen
class Argument:
    """An argument of a program: a tensor and its spec.

    Args:
        name: its name in the program.
        recipe: the tensor, or its first part if `spec` is partial.
        spec: its entry of `in_specs`.
    """

    name: str
    recipe: Recipe
    spec: P

    def text(self, mesh: tuple[int, ...]) -> str:
        """Its definition; a partial argument is a list of parts, and each rank holds a shard of one part."""
        if not self.spec.partial:
            return f"{self.name} = {self.recipe.text()}\n"
        sizes = dict(zip(AXES, mesh, strict=False))
        count = 1
        for axis, _ in self.spec.partial:
            count *= sizes[axis]
        recipes = [attrs.evolve(self.recipe, seed=self.recipe.seed + part) for part in range(count)]
        parts = "".join(f"    {recipe.text()},\n" for recipe in recipes)
        op = _COMBINE[self.spec.partial[0][1]]
        return f"{self.name}_parts = [\n{parts}]\n{self.name} = functools.reduce({op}, {self.name}_parts)\n"


_COMBINE = MappingProxyType({"sum": "torch.add", "max": "torch.maximum", "min": "torch.minimum"})


@attrs.frozen
class Line:
    """One or more lines of a program from one operator of the pool: the operator's name, and the text."""

    operator: str
    text: str


@attrs.frozen
class Program:
    """A function, its arguments and constants, a transform, a mesh, and specs.

    Args:
        seed: the seed that it was generated from.
        mesh: the sizes of the mesh axes.
        machine: an index into `MACHINES`.
        arguments: the arguments of the function.
        constants: the tensors that the function closes over.
        lines: the body of the function.
        outputs: the names of the values that the function returns.
        transform: the transform that the function runs under.
        out_specs: a spec for each of the first results; the others are replicated.
        values: how many arguments and intermediate values have more than one element.
        strided: how many of those are not contiguous; arguments count as they are passed.
    """

    seed: int
    mesh: tuple[int, ...]
    machine: int
    arguments: tuple[Argument, ...]
    constants: tuple[tuple[str, Recipe], ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    transform: Transform
    out_specs: tuple[P, ...] = ()
    values: int = attrs.field(default=0, eq=False)
    strided: int = attrs.field(default=0, eq=False)

    def definitions(self) -> str:
        """The source of the arguments, of the function `f`, and of `program`, which is `f` under the transform."""
        given = "".join(argument.text(self.mesh) for argument in self.arguments)
        closed = "".join(f"{name} = {recipe.text()}\n" for name, recipe in self.constants)
        body = "".join(f"    {text}\n" for line in self.lines for text in line.text.split("\n"))
        names = tuple(argument.name for argument in self.arguments)
        function = f"def f({', '.join(names)}):\n{body}    return [{', '.join(self.outputs)}]\n\n\n"
        reference = f"\n\n{self.transform.reference(names)}" if self.transform.has_reference else ""
        return f"{given}{closed}\n\n{function}{self.transform.text(names)}{reference}"

    def source(self) -> str:
        """A script that runs the program on the mesh and on one device, and compares."""
        definitions = self.definitions()
        sizes = ", ".join(f'"{axis}": {size}' for axis, size in zip(AXES, self.mesh, strict=False))
        partial = any(argument.spec.partial for argument in self.arguments)
        specs = "".join(f"{argument.spec!r}, " for argument in self.arguments)
        given = ", ".join(
            f"spread({argument.name}_parts, {argument.spec!r})" if argument.spec.partial else argument.name
            for argument in self.arguments
        )
        in_order = "clone(memory_format=torch.contiguous_format)"
        plain = ", ".join(f"{argument.name}.{in_order}" for argument in self.arguments)
        reference = "reference" if self.transform.has_reference else "program"
        imports = [
            f"# python -m proofs.fuzz --seed {self.seed}",
            *(["import functools"] if partial else []),
            "import torch",
            *(["import torch.nn.functional as F"] if "F." in definitions else []),
            "import spmd",
            "from spmd import P",
            *(["from spmd.tracing.running import is_tracing"] if "is_tracing" in definitions else []),
        ]
        return (
            "\n".join(imports)
            + "\n\ntorch.set_default_dtype(torch.float64)\ng = torch.Generator()\n"
            + f'mesh = spmd.make_mesh({{{sizes}}}, runtime="virtual")\n{_SPREAD if partial else ""}{definitions}\n\n'
            + f"jitted = spmd.jit(program, ({specs}), {list(self.out_specs)!r}, {MACHINES[self.machine]}mesh=mesh)\n"
            + f"torch.manual_seed({SEED})\nexpected = {reference}({plain})\n"
            + f"torch.manual_seed({SEED})\nactual = jitted({given})\n"
            + "for a, e in zip(actual, expected, strict=True):\n"
            + "    torch.testing.assert_close(a.full_tensor(), e, rtol=1e-8, atol=1e-8, equal_nan=True)\n"
        )

    def compiled(self) -> dict[str, Any]:
        """The namespace of `definitions` plus `reference`, which one device runs; tracebacks show program lines."""
        source = self.definitions()
        file = f"fuzz_{self.seed}.py"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        namespace = {**names(), "mesh": mesh_of(self.mesh), "__name__": "fuzz"}  # a module's, as a user's is
        exec(compile(source, file, "exec"), namespace)
        namespace.setdefault("reference", namespace["program"])
        return namespace

    def kinds(self) -> list[Kind]:
        """The kind of each argument."""
        return [argument.recipe.kind for argument in self.arguments]


_SPREAD = '''

def spread(parts, spec):
    """Ranks that differ in a partial axis hold shards of different parts."""
    whole = spmd.DTensorSpec.make(mesh, spec, spmd.TensorMeta.of(parts[0]))
    axes = [axis for axis, _ in spec.partial]
    held = [parts[mesh.axis_index(at, axes)][whole.local_slices(at)] for at in mesh.coordinates()]
    return spmd.DTensor.from_local(held, mesh, spec, shape=parts[0].shape)


'''


@functools.cache
def mesh_of(sizes: tuple[int, ...]) -> Mesh:
    """The virtual mesh with axes of these sizes."""
    return make_mesh(dict(zip(AXES, sizes, strict=False)), runtime="virtual")


def default_dtype() -> Any:
    """A context in which the default dtype is float64, as in the scripts of `Program.source`."""
    return _DefaultDtype()


class _DefaultDtype:
    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before)
