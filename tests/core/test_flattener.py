from collections import OrderedDict, defaultdict, deque, namedtuple

import optree
import pytest
import torch

from spmd.core.flattener import flattener
from spmd.core.pytree import NAMESPACE, tree_flatten

Pair = namedtuple("Pair", "first second")
Other = namedtuple("Other", "first second")


@optree.dataclasses.dataclass(namespace="spmd")
class State:
    params: object
    step: object


class Mapping(dict):
    pass


TREES = [
    1,
    None,
    (),
    {},
    ((),),
    (1,),
    [1],
    [1, 2],
    Pair(1, 2),
    Other(1, 2),
    (1, 2),
    (1, None),
    (None, 1),
    {"a": 1, "b": 2},
    {"b": 1, "a": 2},
    {"a": 1, "c": 2},
    {"a": 1},
    {1: 1, 2: 2},
    {None: 1, (2, "x"): 2},
    Mapping(a=1, b=2),
    OrderedDict(a=1, b=2),
    OrderedDict(b=1, a=2),
    defaultdict(int, a=1, b=2),
    deque([1, 2]),
    State(1, 2),
    State({"w": 1}, 2),
    torch.return_types.sort((1, 2)),
    torch.Size([1, 2]),
    ({"w": [1, (2, Pair(3, [4]))], "b": None}, State([5, 6], 7), [OrderedDict(x=8)], 9),
    ({"w": [1, (2, Pair(3, (4,)))], "b": None}, State([5, 6], 7), [OrderedDict(x=8)], 9),
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_trees_of_this_structure_have_leaves_and_no_other_tree_has(tree):
    leaves, structure = tree_flatten(tree)
    flatten = flattener(structure)
    assert leaves == flatten(tree)
    for other in TREES:
        expected, found = tree_flatten(other)
        got = flatten(other)
        if found == structure:
            assert expected == got
        else:
            assert got is None or not all(optree.tree_is_leaf(leaf, namespace=NAMESPACE) for leaf in got), other


def test_containers_in_place_of_leaves_are_returned():
    flatten = flattener(optree.tree_structure(({"w": 1}, 2)))
    assert flatten(({"w": [3, 4]}, None)) == [[3, 4], None]


def test_a_structure_of_many_leaves():
    tree = [{"w": (number, [number])} for number in range(1000)]
    assert tree_flatten(tree)[0] == flattener(optree.tree_structure(tree))(tree)
