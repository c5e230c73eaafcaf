"""One signature of a jitted function: its stages, each computed at its first use, and the call itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from spmd.api.call_check import CallCheck
from spmd.api.parameters import Layout, Parameters
from spmd.api.programs.options import Options
from spmd.api.programs.program import Program, StandIn
from spmd.api.signature import Signature, split, with_dynamic
from spmd.api.transforms.flat_function import FlatFunction
from spmd.api.transforms.transformed import call
from spmd.api.values.arguments import check_argument
from spmd.api.values.communication import is_watched, record_comms
from spmd.api.values.distribute import check_same, place
from spmd.api.values.dtensor import DONATED, DTensor, Shards, lose_shards, wrap
from spmd.collectives.distributed.agreement import failing_together, spans_processes
from spmd.core.flattener import Flattener, flattener
from spmd.core.mesh import use_mesh
from spmd.core.pytree import leaf_specs, tree_flatten, tree_leaves
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import TraceError
from spmd.ir.graph import Graph
from spmd.job import checks
from spmd.lowering.program import LocalProgram
from spmd.runtime.agreement import first_run
from spmd.runtime.torch_settings import torch_settings
from spmd.tracing.trace import Traced, trace

if TYPE_CHECKING:
    from spmd.inspect.plan import Plan


class Compiled:
    """A jitted function for one structure, and one shape and dtype of each argument.

    It is called with such arguments. `traced`, `plan`, and `program` are the stages of compilation.
    """

    def __init__(
        self,
        parameters: Parameters,
        args: tuple[Any, ...],
        signature: Signature,
        in_specs: Any,
        out_specs: Any,
        options: Options,
    ) -> None:
        self.mesh, self.options = signature.mesh, options
        self._parameters, self._out_specs, self.signature = parameters, out_specs, signature
        self._function = signature.layout.by_position(parameters.function)
        self._donated = signature.donated
        _, dynamic = split(args, signature.layout.static)
        prefix, of = signature.layout.prefix(in_specs), signature.layout.described
        given = leaf_specs(prefix, dynamic, self.mesh, what="in_specs", of=of, optional=True)
        found = (spec or own for spec, own in zip(given, signature.own, strict=True))
        self.in_specs: tuple[DTensorSpec, ...] = tuple(spec for spec in found if spec is not None)
        self._takes_plain = [own is None or own.is_replicated for own in signature.own]
        stand_ins = [StandIn(spec.meta, self.mesh.device) for spec in self.in_specs]
        self._args = with_dynamic(args, signature.static, signature.tree.unflatten(stand_ins))
        self._key = signature.key
        self._has_run = False
        self._seen = list(self.in_specs)  # of the last call: comparing the same objects is faster

    @functools.cached_property
    def traced(self) -> Traced:
        """The function as one flat program, with copies of the tensors that it closes over, which may change later."""
        with use_mesh(self.mesh):
            layout = self.signature.layout
            traced = trace(self._function, self._args, static_argnums=layout.static, labels=layout.labels)
        return attrs.evolve(traced, graph=_with_copies(traced.graph, {}))

    @functools.cached_property
    def staged(self) -> Program:
        """The traced function with its specs: the later stages."""
        metas = [value.meta for value in self.traced.graph.outputs]
        tree = self.traced.out_tree.unflatten(metas)
        of = "the result"
        given = leaf_specs(self._out_specs, tree, self.mesh, what="out_specs", item="result", of=of, optional=True)
        return Program(self.traced, self.mesh, self.in_specs, tuple(given), self._donated, self.options)

    @functools.cached_property
    def check_call(self) -> CallCheck:
        """Compares a call with those of the other ranks, under `init(check="calls")`."""

        def is_random() -> bool:
            return any(operation.is_random for operation in self.traced.graph.operations)

        return CallCheck(self._function, self.signature, self.in_specs, functools.cache(is_random))

    @property
    def plan(self) -> Plan:
        """The plan: a spec for every value, and the collectives; errors as `Program.plan`."""
        return self.staged.plan

    @property
    def program(self) -> LocalProgram:
        """The lowered program that each rank runs."""
        return self.staged.local

    def __repr__(self) -> str:
        return f"Compiled({self.traced.name} for {self.signature.tree} on {self.mesh})"

    def prepare(self, leaves: Sequence[Any] | None = None) -> None:
        """Make all that a call needs, and check its arguments; on a distributed mesh a collective call.

        Ranks compare programs once. An error on one rank before they compare anything is raised on all ranks.

        Args:
            leaves: the flattened arguments; None to check none.

        Raises:
            DivergenceError: the ranks have different programs.
            MeshError: an abstract mesh, on which nothing can run, or a DTensor on another mesh.
            ShardingError: a DTensor whose spec differs, or an argument that is no tensor with data.
        """
        first = "staged" not in self.__dict__ or not self.staged.is_ready
        name = first_run(self.mesh) if first else self._call
        with failing_together(name, self.mesh, first or self._compares(leaves or ())):
            self._check_call(leaves)
        self._executable, self._results = self.staged.executable, self.staged.out_specs
        self._out_tree = self.traced.out_tree

    @property
    def _call(self) -> str:
        """A call, in messages."""
        return f"a call of {self.traced.name} on {self.mesh}"

    def _compares(self, leaves: Sequence[Any]) -> bool:
        """Whether ranks compare the arguments of a call: in the first one, and plain tensors."""
        return not self._has_run or not all(isinstance(leaf, DTensor) for leaf in leaves)

    def _check_call(self, leaves: Sequence[Any] | None) -> None:
        """Make the program and check the arguments, without communication."""
        self.staged.check_runs()
        for leaf, spec, path in zip(leaves or (), self.in_specs, self.traced.input_paths, strict=leaves is not None):
            check_argument(leaf, spec, f"argument {path}")

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run with arguments of this signature.

        Raises:
            TraceError: other static arguments, another structure, or other settings of torch than those of compilation.
            DivergenceError, MeshError, ShardingError: as `place`.
        """
        held, layout = self.signature, self._parameters.layout(args, keywords)
        if layout != held.layout:
            raise TraceError(
                f"{self!r} was compiled for arguments {', '.join(held.layout.labels)} (got "
                f"{', '.join(layout.labels)}). Call the jitted function instead."
            )
        static, dynamic = split(layout.positional(args, keywords), layout.static)
        leaves, tree = tree_flatten(dynamic)
        if static != held.static:
            raise TraceError(f"{self!r} was compiled for other static arguments. Call the jitted function instead.")
        if tree != held.tree:
            raise TraceError(f"Compiled for arguments {held.tree} (got {tree}). Call the jitted function instead.")
        if torch_settings() != held.settings:
            raise TraceError(
                f"{self!r} was compiled under other settings of torch: autocast, the default dtype or device, function "
                "modes, the deterministic mode or the choice of kernels differ now. Call the jitted function instead, "
                "or restore them."
            )
        if checks.every_call and spans_processes(self.mesh):
            self.check_call(leaves)
        return self.run(self.place(leaves), leaves)

    @functools.cached_property
    def flat(self) -> FlatFunction:
        """The function of its flat tensors, of which transforms from outside are programs too."""

        def function(*leaves: torch.Tensor) -> list[torch.Tensor]:
            dynamic = self.signature.tree.unflatten(leaves)
            return tree_leaves(self._function(*with_dynamic(self._args, self.signature.static, dynamic)))

        given = [None if spec is None else spec.pspec for spec in self.staged.given_out_specs]
        return FlatFunction(function, self.mesh, self.in_specs, given, self.options, self.traced.name)

    def transformed(self, leaves: Sequence[Any]) -> Any:
        """Run the function on tensors on which transforms act, or of which autograd records the use."""
        for leaf, spec, path in zip(leaves, self.in_specs, self.traced.input_paths, strict=True):
            if isinstance(leaf, DTensor):
                check_argument(leaf, spec, f"argument {path}")
        return self.traced.out_tree.unflatten(call(self.flat, leaves))

    def leaves(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        """The flattened dynamic arguments of a call of this signature."""
        layout = self._parameters.layout(args, keywords)
        return tree_leaves(split(layout.positional(args, keywords), layout.static)[1])

    @property
    def layout(self) -> Layout:
        """Which arguments it takes, in order."""
        return self.signature.layout

    @functools.cached_property
    def flatten(self) -> Flattener:
        """The leaves of the dynamic arguments of a call, if they have this structure; else None."""
        return flattener(self.signature.tree)

    def match(self, key: tuple[Any, ...], leaves: Sequence[Any]) -> list[Shards] | None:
        """The shards of a call's arguments, if its `Signature.key`, specs, shapes and dtypes are these; else None.

        Args:
            key: the key of the call's signature.
            leaves: what `flatten` returns for its dynamic arguments.
        """
        if key != self._key:
            return None
        try:
            specs = [leaf._spec for leaf in leaves]
        except AttributeError:
            return self._match_plain(leaves)
        if specs != self._seen:
            return None
        self._seen = specs
        return [leaf._shards for leaf in leaves]

    def _match_plain(self, leaves: Sequence[Any]) -> list[Shards] | None:
        """As `match`, of leaves of which some are not DTensors."""
        shards = []
        for leaf, spec, takes_plain in zip(leaves, self.in_specs, self._takes_plain, strict=True):
            if isinstance(leaf, DTensor):
                if leaf._spec != spec:
                    return None
                shards.append(leaf._shards)
            elif takes_plain and _fits(leaf, spec.meta):
                shards.append(place(leaf, spec)._shards)
            else:
                return None
        return shards

    def place(self, leaves: Sequence[Any]) -> list[Shards]:
        """The shards of the arguments; plain tensors are placed by `in_specs`.

        On a distributed mesh ranks compare their plain tensors here. `match`, which later calls use, does not.

        Raises:
            DivergenceError: a plain tensor that differs between ranks, or as `prepare`.
            MeshError, ShardingError: as `prepare`.
        """
        compares = self._compares(leaves)
        self.prepare(leaves)
        names = [f"argument {path}" for path in self.traced.input_paths]
        if compares:
            check_same(self._call, self.mesh, names, leaves)
        self._has_run = True
        return [
            leaf._shards if isinstance(leaf, DTensor) else place(leaf, spec, name)._shards
            for leaf, spec, name in zip(leaves, self.in_specs, names, strict=True)
        ]

    def run(self, shards: list[Shards], leaves: Sequence[Any]) -> Any:
        """Run the program on shards, and wrap the shards of the results as DTensors.

        Args:
            shards: the shards of all arguments; the list is emptied.
            leaves: the flattened arguments; those that are donated lose their shards.
        """
        if is_watched():
            record_comms(self.program.collectives, self.traced.name)
        donated = [leaves[index] for index in self._donated]
        lose_shards([leaf for leaf in donated if isinstance(leaf, DTensor)], DONATED)
        results = self._executable(shards)
        return self._out_tree.unflatten(list(map(wrap, self._results, results)))


def _with_copies(graph: Graph, copies: dict[int, torch.Tensor]) -> Graph:
    """The program with copies of its constants, by their ids: those of all variants share them."""
    constants = tuple((value, copies.setdefault(id(x), _copy(x))) for value, x in graph.constants)
    variants = graph.variants and graph.variants.map(lambda other: _with_copies(other, copies))
    return attrs.evolve(graph, constants=constants, variants=variants)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    copied = tensor.detach().clone()
    if copied.stride() == tensor.stride() or tensor.numel() == 0:
        return copied
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.detach().as_strided((span,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def _fits(leaf: Any, meta: TensorMeta) -> bool:
    """Whether a leaf is a plain tensor with data, of a given shape and dtype."""
    plain = isinstance(leaf, torch.Tensor) and not leaf.is_meta
    return plain and leaf.dtype is meta.dtype and tuple(leaf.shape) == meta.shape
