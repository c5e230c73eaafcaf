"""Tensor-parallel specs, found from what a model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.func import functional_call

from spmd.api.model_specs.features import Feature, WeightAtom, find_features
from spmd.api.model_specs.leaves import Choice, Leaf, Show, leaves_of, model_state, table
from spmd.core.mesh import Mesh, current_mesh
from spmd.core.pytree import tree_flatten
from spmd.core.single_threaded import single_threaded
from spmd.core.spec import P, has_meta
from spmd.errors import ShardingError
from spmd.ir.graph import Graph
from spmd.ir.simplify import eliminate_dead
from spmd.plan.search.prepare import strategies_of
from spmd.rules import RULES, find_rule
from spmd.rules.strategy import LogicalShape
from spmd.tracing.canonicalize.canonicalize import canonicalize
from spmd.tracing.trace import trace
from spmd.tracing.traced import Traced


def tensor_parallel_specs(
    module: torch.nn.Module,
    axis: str,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    mesh: Mesh | None = None,
    show: Show | None = None,
) -> dict[str, P]:
    """Tensor-parallel specs of a module's parameters and buffers, from what it computes: no names are read.

    The module is traced once. Dims that its operators relate are one *feature*: the hidden units of an MLP are the
    columns of one weight and the rows of the next, the heads of an attention layer are in q, k, v and the projection
    after them. A feature is sharded where all that it passes through keeps it apart (elementwise operators, attention,
    reshapes), until a weight sums over it. So the first weights are column parallel, with their biases, and the last
    ones row parallel: one sum over the ranks for each MLP and each attention layer, as in Megatron-LM
    (https://arxiv.org/abs/1909.08053). Embeddings are sharded over the vocabulary. What norms reduce stays whole, and
    so do heads that do not divide over the axis, and weights whose results are split (q, k and v in one weight).
    Features that exclude each other compete by the bytes of weights that they shard for each byte that is then sent.

    The planner may still gather a weight where that is faster, as in small models: `jit(..., keep_sharded={0: axis})`.

    Args:
        module: the module; parameters may be meta tensors.
        axis: the mesh axis.
        args, kwargs: what it is called with, as for `torch.export.export`; only the shapes and dtypes of tensors
            matter, so they may be meta tensors or TensorMetas. Its results may be any nest of tensors.
        mesh: the mesh; by default that of `use_mesh`. Only the size of the axis matters.
        show: is called with a table of the specs and why they are so: `print`.

    Returns:
        The specs by the names of parameters and buffers, as from `spmd.specs`. To override some,
        `{**found, "lm_head.weight": P()}`; to shard over data, too, `spmd.fsdp_specs(module, "data", base=found)`.

    Raises:
        ShardingError: no module, or no parameter that can be sharded.
        MeshError: no mesh, or an axis that it lacks.
        TraceError: the module cannot be traced, as under `jit`.

    >>> from spmd import TensorMeta, make_mesh
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    >>> x, mesh = TensorMeta((3, 4), torch.float32), make_mesh({"model": 2}, runtime="virtual")
    >>> for name, spec in tensor_parallel_specs(model, "model", (x,), mesh=mesh).items():
    ...     print(name, spec)
    0.weight P('model')
    0.bias P('model')
    2.weight P(None, 'model')
    2.bias P()
    """
    mesh = current_mesh(mesh)
    ranks = mesh.axis_size(axis)
    if not isinstance(module, torch.nn.Module):
        raise ShardingError(
            f"tensor_parallel_specs needs an nn.Module, which it traces (got {type(module).__name__}). For other trees "
            "write patterns: spmd.specs(tree, {...})."
        )
    leaves, structure = leaves_of(module)
    traced = _trace(module, args, kwargs or {})
    with single_threaded():
        graph = eliminate_dead(traced.graph)
        graph = canonicalize(graph, lambda op: find_rule(op, RULES) is None)
        refinement, strategies = strategies_of(graph, RULES)
        features = find_features(graph, refinement.values, strategies, len(leaves))
    names = frozenset(dict(module.named_parameters()))
    trained = frozenset(number for number, leaf in enumerate(leaves) if leaf.path in names)
    choices = list(_Selection(graph, refinement.values, features, trained, ranks).choices(leaves, axis))
    if show is not None:
        show(table(choices, mesh, "why"))
    if all(choice.spec == P() for choice in choices):
        reasons = "\n".join(f"  {choice.leaf.path}: {choice.reason}" for choice in choices[:8])
        raise ShardingError(
            f"No parameter of {type(module).__name__} can be sharded over {axis!r} ({ranks} ranks) with only sums "
            f"between ranks:\n{reasons}\nWrite patterns, spmd.specs(module, {{...}}), or use spmd.fsdp_specs."
        )
    return structure.unflatten([choice.spec for choice in choices])


def _trace(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
    """The program of a call of a module, whose first inputs are its parameters and buffers in optree's order."""
    values, structure = tree_flatten((tuple(args), dict(kwargs)))
    places = [number for number, value in enumerate(values) if has_meta(value)]

    def forward(state: dict[str, torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        given = dict(zip(places, tensors, strict=True))
        call = structure.unflatten([given.get(number, value) for number, value in enumerate(values)])
        held = {name: tensor.clone() for name, tensor in state.items()}  # the module may write to its buffers
        return list(_tensors(functional_call(module, held, *call)))

    return trace(forward, (model_state(module), [values[number] for number in places]), name=type(module).__name__)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module returns, such as the mappings of transformers; other values are left out."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Mapping):
        yield from _tensors(list(result.values()))
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)


@attrs.frozen(eq=False)
class _Weight:
    """An atom of a weight and the feature that it belongs to."""

    part: WeightAtom
    feature: Feature


class _Selection:
    """Selects the features that are sharded: no two of them in one tensor, by bytes sharded for each byte sent.

    Args:
        graph: the program; the first inputs are the weights.
        logical: the atoms of every value.
        features: the features of the weights.
        trained: the inputs that are parameters; a feature of buffers alone is not sharded.
        ranks: the number of ranks.
    """

    def __init__(
        self,
        graph: Graph,
        logical: Mapping[Any, LogicalShape],
        features: Sequence[Feature],
        trained: frozenset[int],
        ranks: int,
    ) -> None:
        self.graph, self.logical, self.ranks = graph, logical, ranks
        self.trained = trained
        self.weights: dict[int, list[_Weight]] = {}
        for feature in features:
            for part in feature.parts:
                self.weights.setdefault(part.input, []).append(_Weight(part, feature))
        self.chosen: list[Feature] = []
        for feature in sorted(features, key=self._rank):
            if not self._refusal(feature):
                self.chosen.append(feature)

    def choices(self, leaves: Sequence[Leaf], axis: str) -> Iterator[Choice]:
        """The spec of each weight, and why it has it."""
        for number, leaf in enumerate(leaves):
            weights = sorted(self.weights.get(number, ()), key=lambda weight: (weight.part.dim, weight.part.place))
            found = next((weight for weight in weights if weight.feature in self.chosen), None)
            if found is not None:
                yield Choice(leaf, P(*(None,) * found.part.dim, axis), self._role(found))
            else:
                yield Choice(leaf, P(), self._why_whole(weights))

    def _why_whole(self, weights: Sequence[_Weight]) -> str:
        """The reason that is nearest to what a user can change, of those of all dims."""
        major = [weight for weight in weights if not weight.part.place]
        refusals = [(refusal, weight) for weight in major if (refusal := self._refusal(weight.feature))]
        if not refusals:
            return "whole: not used"
        (_, reason), weight = min(refusals, key=lambda found: found[0][0])
        return f"whole: dim {weight.part.dim} {reason}"

    def _rank(self, feature: Feature) -> tuple[float, int]:
        """The order of preference: by bytes sharded for each byte sent, then by bytes sent."""
        inputs, outputs = self.graph.inputs, frozenset(self.graph.outputs)
        sharded = sum(inputs[part.input].meta.nbytes for part in feature.parts)
        sent = sum(value.meta.nbytes for operation in feature.summed for value in operation.tensors)
        sent += sum(value.meta.nbytes for value in feature.values & outputs)
        return -sharded / max(sent, 1), sent

    def _refusal(self, feature: Feature) -> tuple[int, str] | None:
        """Why a feature is not sharded, with a number that is low for what a user can change; None if it can be."""
        if feature.obstacle:
            return 2, feature.obstacle
        if self.trained.isdisjoint(part.input for part in feature.parts):
            return 3, "is in no parameter"
        alone = all(self._is_alone(value, position) for value, position in feature.atoms)
        if feature.size < self.ranks or (feature.size % self.ranks and not alone):
            return 0, f"has {feature.size} parts that are used as one, which {self.ranks} ranks do not divide"
        if any(not feature.values.isdisjoint(other.values) for other in self.chosen):
            return 1, "is in a tensor of which another dim is sharded"
        return None

    def _is_alone(self, value: Any, position: int) -> bool:
        """Whether an atom is all of its dim, which may be split unevenly then."""
        start = 0
        for sizes in self.logical[value]:
            if start <= position < start + len(sizes):
                return len(sizes) == 1
            start += len(sizes)
        raise AssertionError("an atom that its value lacks")

    def _role(self, weight: _Weight) -> str:
        """What a sharded weight does with its feature."""
        value, feature = self.graph.inputs[weight.part.input], weight.feature
        derived = {value}
        for operation in self.graph.operations:
            if derived.isdisjoint(operation.operands):
                continue
            if operation in feature.summed:
                looked_up = operation.name == "embedding"
                return f"{'rows looked up' if looked_up else 'row parallel: summed'} at {operation.source}"
            if len(operation.operands) == 1:
                derived.update(operation.tensors)
        return f"{'column parallel' if value.meta.ndim > 1 else 'as its features'}: {feature.size} parts"
