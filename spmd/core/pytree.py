"""Pytrees of arguments: paths for messages, and specs as pytree prefixes.

A prefix, as in JAX, is a tree of specs that may end above the leaves of the arguments: a spec in it holds for all
leaves below. A leaf of a prefix is a `P` or a tuple of placements, one per mesh axis; a tuple of `P`s is a container.
Trees are those of optree: dicts, tuples, lists and namedtuples are containers, and None is an empty subtree. So are
dataclasses, and what torch's pytrees know (`spmd.core.containers`). Users register other classes with optree, either
globally or in the namespace `"spmd"`, or with `torch.utils._pytree`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, TypeAlias, overload

import optree
import torch

from spmd.core.containers import NAMESPACE, fields_of, is_registered, register_containers
from spmd.core.mesh import Mesh
from spmd.core.modules import ModuleState, by_first_name, register_modules
from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.core.spec import FREE, NESTED, QUANTIZED, DTensorSpec, P, TensorMeta, has_meta
from spmd.core.value_types import CONSTANTS, NUMBERS
from spmd.errors import ShardingError

SpecLike: TypeAlias = P | Sequence[Placement]
"""The spec of one tensor as users write it: a `P`, or one placement for each mesh axis."""

_IsLeaf: TypeAlias = Callable[[Any], bool] | None

_TEXT_LIMIT = 300

register_modules(NAMESPACE)


def tree_flatten(tree: Any, is_leaf: _IsLeaf = None) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of a pytree, in optree's order, and its structure."""
    leaves, structure = optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)
    return tree_flatten(tree, is_leaf) if register_containers(leaves) else (leaves, structure)


def tree_leaves(tree: Any, is_leaf: _IsLeaf = None) -> list[Any]:
    """The leaves of a pytree, in optree's order."""
    return tree_flatten(tree, is_leaf)[0]


def tree_structure(tree: Any, is_leaf: _IsLeaf = None) -> optree.PyTreeSpec:
    """The structure of a pytree."""
    return tree_flatten(tree, is_leaf)[1]


def tree_map(function: Callable[..., Any], tree: Any, *rest: Any, is_leaf: _IsLeaf = None) -> Any:
    """A pytree of what a function returns for the leaves of pytrees of one structure."""
    for other in (tree, *rest):
        tree_flatten(other, is_leaf)  # registers containers
    return optree.tree_map(function, tree, *rest, is_leaf=is_leaf, namespace=NAMESPACE)


def with_module_states(tree: Any) -> Any:
    """A pytree with a `ModuleState` in place of each `nn.Module`."""
    if not any(isinstance(leaf, torch.nn.Module) for leaf in tree_leaves(tree)):
        return tree
    return tree_map(lambda leaf: ModuleState.of(leaf) if isinstance(leaf, torch.nn.Module) else leaf, tree)


def tree_flatten_with_accessor(
    tree: Any, is_leaf: _IsLeaf = None
) -> tuple[list[optree.PyTreeAccessor], list[Any], optree.PyTreeSpec]:
    """As `tree_flatten`, with the way to each leaf."""
    tree_flatten(tree, is_leaf)  # registers containers
    return optree.tree_flatten_with_accessor(tree, is_leaf, namespace=NAMESPACE)  # type: ignore[no-any-return]


def is_spec(node: Any) -> bool:
    """Whether a node of a prefix is one spec: a `P`, or a nonempty tuple or list of placements.

    >>> is_spec((Shard(0), Replicate())), is_spec((P(), P("data"))), is_spec(())
    (True, False, False)
    """
    if type(node) in (tuple, list):  # not a namedtuple: that is a container
        return len(node) > 0 and all(isinstance(item, (Shard, Replicate, Partial)) for item in node)
    return isinstance(node, P)


def path_text(accessor: optree.PyTreeAccessor) -> str:
    """A path as shown in messages: the argument's number, then Python indexing down to the leaf; `""` for the root.

    >>> accessors, _, _ = optree.tree_flatten_with_accessor(({"w": [3, 4]},))
    >>> path_text(accessors[1])
    "0['w'][1]"
    """
    if accessor and isinstance(accessor[0], optree.SequenceEntry):
        return f"{accessor[0].entry}{accessor[1:].codify('')}"
    return accessor.codify("")


def flatten_with_paths(tree: Any) -> tuple[list[str], list[Any], optree.PyTreeSpec]:
    """The paths (as text) and the values of all leaves of a pytree, in optree's order, and the tree's structure.

    >>> paths, leaves, _ = flatten_with_paths(({"w": 1, "b": None}, 2))
    >>> paths, leaves
    (["0['w']", '1'], [1, 2])
    """
    accessors, leaves, structure = tree_flatten_with_accessor(tree)
    return [path_text(accessor) for accessor in accessors], leaves, structure


@overload
def broadcast_prefix(
    prefix: Any, tree: Any, *, what: str, of: str = ..., optional: Literal[False] = ...
) -> list[SpecLike]: ...


@overload
def broadcast_prefix(
    prefix: Any, tree: Any, *, what: str, of: str = ..., optional: bool
) -> Sequence[SpecLike | None]: ...


def broadcast_prefix(
    prefix: Any, tree: Any, *, what: str, of: str = "the arguments", optional: bool = False
) -> Sequence[SpecLike | None]:
    """The spec of every leaf of `tree`, in optree's order, from a pytree prefix of specs.

    Args:
        prefix: one spec, or containers that match those of `tree`, with specs inside.
        tree: any pytree; only its structure matters.
        what: what the prefix is, for messages: `"in_specs"`.
        of: what the tree is, for messages.
        optional: whether None stands for leaves without a spec.

    Raises:
        ShardingError: the prefix does not match the tree; the message has the path and both structures.

    >>> broadcast_prefix((P(), P("data")), ({"w": 1, "b": 2}, 3), what="in_specs")
    [P(), P(), P('data')]
    """
    try:
        return _broadcast(prefix, tree, optree.PyTreeAccessor(), optional)
    except _MismatchError as mismatch:
        where = path_text(mismatch.accessor)
        raise ShardingError(
            f"{what} does not fit {of}{f' at {where}' if where else ''}: {mismatch.reason}\n"
            f"  {what}: {_shorten(repr(prefix))}\n  {of}: {_shorten(structure_text(tree))}"
        ) from None


@overload
def leaf_specs(
    prefix: Any, tree: Any, mesh: Mesh, *, what: str, item: str = ..., of: str = ..., optional: Literal[False] = ...
) -> list[DTensorSpec]: ...


@overload
def leaf_specs(
    prefix: Any,
    tree: Any,
    mesh: Mesh,
    *,
    what: str,
    item: str = ...,
    of: str = ...,
    optional: bool = ...,
    only_tensors: bool = ...,
    numbers: bool = ...,
) -> Sequence[DTensorSpec | None]: ...


def leaf_specs(
    prefix: Any,
    tree: Any,
    mesh: Mesh,
    *,
    what: str,
    item: str = "argument",
    of: str = "the arguments",
    optional: bool = False,
    only_tensors: bool = False,
    numbers: bool = False,
) -> Sequence[DTensorSpec | None]:
    """The DTensorSpec of every leaf (anything with shape and dtype) of `tree`, from a pytree prefix of specs.

    The arguments are those of `broadcast_prefix`, how messages call a leaf, and whether leaves that are no tensors, or
    floats inside of a tree, are passed over: they get None.

    Raises:
        ShardingError: the prefix does not match the tree, a leaf is not a tensor, or a spec does not fit its leaf; the
            message names the leaf.
    """
    specs = broadcast_prefix(prefix, tree, what=what, of=of, optional=optional)
    paths, leaves, _ = flatten_with_paths(tree)
    names = [f"{item} {path}".rstrip() for path in paths]
    return [
        None
        if spec is None
        or (only_tensors and isinstance(leaf, CONSTANTS) and not has_meta(leaf))
        or (numbers and isinstance(leaf, float) and leaf is not tree)
        else make_spec(mesh, spec, leaf_meta(leaf, name), where=name)
        for spec, leaf, name in zip(specs, leaves, names, strict=True)
    ]


def make_spec(mesh: Mesh, spec: SpecLike, meta: TensorMeta, *, where: str) -> DTensorSpec:
    """`DTensorSpec.make` with errors that name the tensor: `where` is text like `argument 0['w']`.

    Raises:
        ShardingError: the spec does not fit the mesh or the tensor.
    """
    if not is_spec(spec):
        raise ShardingError(f"{where} {meta}: {_shorten(repr(spec))} is not a spec. {_remedy(spec)}")
    try:
        return DTensorSpec.make(mesh, spec, meta)
    except ShardingError as error:
        raise ShardingError(f"{where} {meta}: {error}") from None


def leaf_meta(leaf: Any, where: str) -> TensorMeta:
    """The meta of a tensor, or of any other object with a `shape` and a torch `dtype`.

    Raises:
        ShardingError: `leaf` has no torch dtype, or is nested or quantized; `where` names it in the message.
    """
    if isinstance(leaf, TensorMeta):
        return leaf
    if not isinstance(getattr(leaf, "dtype", None), torch.dtype):
        shown = _shorten(" ".join(repr(leaf).split()), 60)
        raise ShardingError(f"{where} is no tensor (got {type(leaf).__name__} {shown}). {leaf_remedy(leaf)}")
    if getattr(leaf, "is_nested", False):
        raise ShardingError(f"{where} is {NESTED}")
    if getattr(leaf, "is_quantized", False):
        raise ShardingError(f"{where} is {QUANTIZED}")
    return TensorMeta(tuple(leaf.shape), leaf.dtype)


def leaf_remedy(leaf: Any) -> str:
    """Advice for the error message about a leaf that is not a tensor."""
    if isinstance(leaf, torch.nn.Module):
        return "Pass its state, dict(module.named_parameters()), and call it by torch.func.functional_call."
    if isinstance(leaf, NUMBERS):
        return "Pass a tensor, torch.tensor(...); or, to a jitted function, a static argument: static_argnums."
    if hasattr(leaf, "__array__"):
        return "Pass torch.as_tensor(...)."
    if isinstance(leaf, (Iterator, Set)):
        return "Pass a list or a tuple: it has an order, and can be read twice."
    if isinstance(leaf, torch.optim.Optimizer):
        return "Pass the state as tensors, and compute the update in the function, as spmd.optim does."
    if isinstance(leaf, (str, bytes)) or callable(leaf):
        return "Pass a tensor; or, to a jitted function, a static argument: static_argnums."
    if type(leaf).__module__.partition(".")[0] in sys.stdlib_module_names:
        return "Pass tensors in a dict, list or dataclass; or, to a jitted function, a static argument: static_argnums."
    return f"Pass a tensor, or register {type(leaf).__name__} with optree as a container: namespace='{NAMESPACE}'."


def structure_text(tree: Any) -> str:
    """A pytree as shown in messages: `({'w': f32[8,6]}, i64[])`."""

    def show(leaf: Any) -> _Text:
        if is_registered(leaf):
            children = (f"{name}={structure_text(child)}" for name, (_, child) in _children(leaf).items())
            return _Text(f"{type(leaf).__name__}({', '.join(children)})")
        if isinstance(leaf, torch.Tensor):
            return _Text(str(TensorMeta.of(leaf)))
        return _Text(str(leaf) if isinstance(leaf, TensorMeta) else type(leaf).__name__)

    return repr(tree_map(show, tree, is_leaf=is_registered))


class _Text(str):
    """Text that is its own repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _MismatchError(Exception):
    """A prefix does not match its tree at `accessor`."""

    def __init__(self, accessor: optree.PyTreeAccessor, reason: str) -> None:
        super().__init__(reason)
        self.accessor = accessor
        self.reason = reason


def _broadcast(prefix: Any, tree: Any, accessor: optree.PyTreeAccessor, optional: bool) -> Sequence[SpecLike | None]:
    if is_spec(prefix) or (prefix is None and optional):
        return [prefix] * tree_structure(tree).num_leaves
    if prefix is None and tree is None:
        return []
    if prefix is None or _is_leaf(prefix):
        raise _MismatchError(accessor, f"{_shorten(repr(prefix))} is not a spec. {_remedy(prefix)}")
    if tree is None or _is_leaf(tree):
        raise _MismatchError(accessor, f"expected one spec for {structure_text(tree)} (got {_container(prefix)}).")
    wanted, given = _children(tree), _given(prefix)
    if isinstance(tree, ModuleState) and isinstance(prefix, Mapping) and not given.keys() <= wanted.keys():
        given = by_first_name(given, tree.structure.module)
    if not _same_container(prefix, tree) or not _covers(given, wanted, tree):
        raise _MismatchError(accessor, f"expected one spec or {_container(tree)} (got {_container(prefix)}).")
    specs: list[SpecLike | None] = []
    for key, (entry, child) in wanted.items():
        if fields_of(tree) is not None and _has_only_numbers(child):
            specs += [None] * len(tree_leaves(child))
        elif key in given:
            specs += _broadcast(given[key], child, accessor + optree.PyTreeAccessor((entry,)), optional)
    return specs


def _is_leaf(node: Any) -> bool:
    return bool(optree.tree_is_leaf(node, namespace=NAMESPACE)) and not register_containers([node])


def _children(node: Any) -> dict[Any, tuple[optree.PyTreeEntry, Any]]:
    """The children of a container, by key: each with its optree entry, in optree's order."""
    accessors, children, _ = tree_flatten_with_accessor(node, is_leaf=lambda item: item is not node)
    entries = [accessor[0] for accessor in accessors]
    return {entry.entry: (entry, child) for entry, child in zip(entries, children, strict=True)}


def _given(prefix: Any) -> dict[Any, Any]:
    """What a container of a prefix has for the children of a tree, by key."""
    fields = fields_of(prefix)
    return {key: child for key, (_, child) in _children(prefix).items()} if fields is None else fields


def _covers(given: Mapping[Any, Any], wanted: Mapping[Any, Any], tree: Any) -> bool:
    """Whether a container of a prefix has what it must, and no more: fields without tensors need no spec."""
    fields = fields_of(tree)
    if fields is None:
        return given.keys() == wanted.keys()
    needed = {key for key, (_, child) in wanted.items() if not _has_only_numbers(child)}
    return needed <= given.keys() <= fields.keys()


def _has_only_numbers(node: Any) -> bool:
    """Whether all leaves of a field are numbers, of which specs say nothing."""
    return all(isinstance(leaf, (float, torch.SymFloat)) for leaf in tree_leaves(node))


def _same_container(prefix: Any, tree: Any) -> bool:
    if isinstance(prefix, Mapping) and (isinstance(tree, Mapping) or _is_by_name(tree)):
        return True
    # For torch's named results (structseqs, such as torch.return_types.sort), a plain tuple of specs matches too.
    return type(prefix) is type(tree) or (type(prefix) is tuple and optree.is_structseq(tree))


def _is_by_name(node: Any) -> bool:
    """Whether the children of a container have names, of fields or others."""
    return fields_of(node) is not None or all(isinstance(key, str) for key in _children(node))


def _container(node: Any) -> str:
    if isinstance(node, ModuleState):
        kind = type(node.structure.module).__name__
        return f"a dict by the names of the tensors of {kind}: {_shorten(', '.join(node.structure.names))}"
    name = type(node).__name__
    if isinstance(node, Mapping):
        return f"a {name} with keys {_shorten(', '.join(map(repr, _children(node))))}"
    if isinstance(node, (tuple, list)):
        return f"a {name} of {len(node)}"
    if fields_of(node) is not None:
        return f"a {name} with fields {_shorten(', '.join(_children(node)))}"
    return f"a {name}"


def _remedy(prefix: Any) -> str:
    if prefix is None:
        return "Write P() for a tensor that every rank holds whole."
    if prefix is FREE:
        return "It is out_specs of jit as a whole; in a part of out_specs, None leaves the results to the planner."
    if isinstance(prefix, (Shard, Replicate, Partial)):
        return f"Placements come in a tuple, one a mesh axis: ({prefix!r}, ...); or name axes: P('data')."
    if isinstance(prefix, str):
        return f"Write P({prefix!r})."
    return "A spec is a P or a tuple of placements, one a mesh axis."


def _shorten(text: str, limit: int = _TEXT_LIMIT) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
