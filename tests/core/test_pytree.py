from collections import OrderedDict, namedtuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd.core.mesh import make_mesh
from spmd.core.placement import Partial, Replicate, Shard
from spmd.core.pytree import (
    broadcast_prefix,
    flatten_with_paths,
    is_spec,
    leaf_meta,
    leaf_specs,
    structure_text,
    tree_leaves,
    tree_map,
)
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.errors import ShardingError

MESH = make_mesh({"data": 2, "model": 4}, runtime="virtual")
Pair = namedtuple("Pair", "first second")


@optree.dataclasses.dataclass(namespace="spmd")
class State:
    params: object
    step: object


TREE = ({"w": torch.zeros(8, 6), "b": None, "layers": [torch.zeros(2)]}, Pair(torch.zeros(1), torch.tensor(2)))


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (P("data"), True),
        ((Shard(0), Replicate()), True),
        ([Partial()], True),
        ((), False),
        ((P(), P()), False),
        ((Shard(0), P()), False),
        (Pair(Shard(0), Shard(1)), False),
        (Shard(0), False),
        (None, False),
    ],
)
def test_is_spec(node, expected):
    assert expected == is_spec(node)


def test_paths_read_as_python():
    paths, leaves, structure = flatten_with_paths((TREE[0], TREE[1], State({"w": [3]}, 4)))
    assert paths == ["0['layers'][0]", "0['w']", "1.first", "1.second", "2.params['w'][0]", "2.step"]
    assert leaves[-2:] == [3, 4]
    assert structure.num_leaves == 6


def test_paths_of_trees_that_are_no_tuples():
    assert flatten_with_paths({"loss": 1, "x y": 2})[0] == ["['loss']", "['x y']"]
    assert flatten_with_paths(5)[0] == [""]
    assert flatten_with_paths(State(1, [2]))[0] == [".params", ".step[0]"]


PREFIXES = [
    (P("data"), [P("data")] * 4),
    ((P("data"), P()), [P("data"), P("data"), P(), P()]),
    (({"w": P("data"), "b": None, "layers": P()}, P()), [P(), P("data"), P(), P()]),
    (({"w": P("data"), "b": P("model"), "layers": [P()]}, P()), [P(), P("data"), P(), P()]),
    ((P(), Pair(P("data"), P("model"))), [P(), P(), P("data"), P("model")]),
    ((OrderedDict(w=P("data"), layers=P(), b=P()), P()), [P(), P("data"), P(), P()]),
    ((Shard(0), Replicate()), [(Shard(0), Replicate())] * 4),
    (((Shard(0), Replicate()), P()), [(Shard(0), Replicate())] * 2 + [P()] * 2),
    (([Shard(0), Replicate()], P()), [[Shard(0), Replicate()]] * 2 + [P()] * 2),
]


@pytest.mark.parametrize(("prefix", "expected"), PREFIXES)
def test_prefixes_broadcast(prefix, expected):
    assert expected == broadcast_prefix(prefix, TREE, what="in_specs")


def test_registered_classes_are_containers():
    tree = (State({"w": 1, "v": 2}, 3),)
    assert broadcast_prefix((State(P("data"), P()),), tree, what="s") == [P("data"), P("data"), P()]
    with pytest.raises(ShardingError, match=r"s does not fit the arguments at 0.params: .* keys 'v', 'w' .*keys 'w'\)"):
        broadcast_prefix((State({"w": P()}, P()),), tree, what="s")


LEAVES = st.integers(0, 9)
TREES = st.recursive(
    LEAVES | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(State, inner, inner)
    ),
    max_leaves=8,
)


@given(TREES)
def test_a_whole_tree_of_specs_is_its_own_prefix(tree):
    specs = tree_map(lambda leaf: P(*[None] * leaf, "data"), tree)
    assert tree_leaves(specs) == broadcast_prefix(specs, tree, what="specs")


@given(TREES, st.data())
def test_cutting_a_prefix_short_repeats_its_spec(tree, data):
    """Replacing any subtree of a full prefix by one spec gives that spec to all leaves below, others untouched."""
    specs = tree_map(lambda leaf: P(), tree)
    wanted = []

    def cut(node):
        if data.draw(st.booleans()):
            wanted.extend([P("model")] * len(tree_leaves(node)))
            return P("model")
        children = optree.tree_leaves(node, is_leaf=lambda item: item is not node, namespace="spmd")
        if children == [node] or node is None:
            wanted.extend(tree_leaves(node))
            return node
        structure = optree.tree_structure(node, is_leaf=lambda item: item is not node, namespace="spmd")
        return structure.unflatten([cut(child) for child in children])

    prefix = cut(specs)
    assert wanted == broadcast_prefix(prefix, tree, what="specs")


MISMATCHES = [
    ((P(),), r"in_specs does not fit the arguments: expected one spec or a tuple of 2 \(got a tuple of 1\)"),
    ([P(), P()], r"expected one spec or a tuple of 2 \(got a list of 2\)"),
    (
        ({"w": P(), "layers": P()}, P()),
        r"arguments at 0: .*a dict with keys 'b', 'layers', 'w' \(got .* 'layers', 'w'\)",
    ),
    (({"w": None, "b": P(), "layers": P()}, P()), r"arguments at 0\['w'\]: None is not a spec. Write P\(\) for"),
    (
        ({"w": [P()], "b": P(), "layers": P()}, P()),
        r"at 0\['w'\]: expected one spec for f32\[8,6\] \(got a list of 1\)",
    ),
    (({"w": P(), "b": [P()], "layers": P()}, P()), r"at 0\['b'\]: expected one spec for None \(got a list of 1\)"),
    (({"w": P(), "b": P(), "layers": [P(), P()]}, P()), r"at 0\['layers'\]: .* a list of 1 \(got a list of 2\)"),
    ((P(), (P(), P())), r"arguments at 1: expected one spec or a Pair of 2 \(got a tuple of 2\)"),
    ((P(), Pair(P(), "data")), r"arguments at 1.second: 'data' is not a spec. Write P\('data'\)"),
    ((Shard(0), P()), r"arguments at 0: Shard\(0\) is not a spec. Placements come in a tuple, .* \(Shard\(0\), ...\)"),
    ((P(), 3), r"arguments at 1: 3 is not a spec. A spec is a P or a tuple of placements"),
]


@pytest.mark.parametrize(("prefix", "text"), MISMATCHES)
def test_prefixes_that_do_not_fit(prefix, text):
    with pytest.raises(ShardingError, match=text):
        broadcast_prefix(prefix, TREE, what="in_specs")


def test_the_message_shows_both_structures():
    with pytest.raises(ShardingError) as caught:
        broadcast_prefix({"w": P(), "c": P()}, {"w": torch.zeros(2), "b": TensorMeta((), torch.bool)}, what="specs")
    expected = (
        "specs does not fit the arguments: expected one spec or a dict with keys 'b', 'w' "
        "(got a dict with keys 'c', 'w').\n"
        "  specs: {'w': P(), 'c': P()}\n"
        "  the arguments: {'w': f32[2], 'b': b8[]}"
    )
    assert expected == str(caught.value)


def test_long_structures_are_cut():
    with pytest.raises(ShardingError) as caught:
        broadcast_prefix((P(),), [torch.zeros(2)] * 1000, what="specs")
    assert len(str(caught.value)) < 1000


def test_leaf_specs():
    specs = leaf_specs((P("data"), P()), (TensorMeta((4,), torch.int64), torch.ones(2)), MESH, what="in_specs")
    assert specs == [
        DTensorSpec.make(MESH, P("data"), TensorMeta((4,), torch.int64)),
        DTensorSpec.make(MESH, P(), TensorMeta((2,), torch.float32)),
    ]


@pytest.mark.parametrize(
    ("prefix", "tree", "text"),
    [
        (P("tp"), ({"w": torch.ones(8, 6)},), r"^argument 0\['w'\] f32\[8,6\]: Unknown mesh axis 'tp'"),
        ((P(), P(None, "data")), (torch.ones(2, 2), torch.ones(3)), r"^argument 1 f32\[3\]: .* names 2 dims"),
        (((Shard(0),),), (torch.ones(2),), r"^argument 0 f32\[2\]: Expected one placement for each of the 2 axes"),
        (P(partial={"data": "sum"}), (torch.ones(2).bool(),), r"^argument 0 b8\[2\]: .*torch.bool has no sum"),
        (P(), (1.5,), r"^argument 0 is no tensor \(got float 1.5\). Pass a tensor"),
    ],
)
def test_specs_that_do_not_fit_name_the_argument(prefix, tree, text):
    with pytest.raises(ShardingError, match=text):
        leaf_specs(prefix, tree, MESH, what="in_specs")


def test_leaf_meta_takes_anything_with_shape_and_dtype():
    expected = TensorMeta((3, 2), torch.float32)
    assert expected == leaf_meta(torch.empty(3, 2, device="meta"), "x") == leaf_meta(expected, "x")


def test_structure_text():
    assert structure_text(TREE) == "({'w': f32[8,6], 'b': None, 'layers': [f32[2]]}, Pair(first=f32[1], second=i64[]))"
