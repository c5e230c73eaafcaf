import dataclasses

import optree
import pytest
import torch
from container_cases import Encoding, Fields, Frozen, Kind, Output, Pair, State, Unknown

from spmd.core.flattener import flattener
from spmd.core.pytree import broadcast_prefix, flatten_with_paths, structure_text, tree_leaves, tree_map, tree_structure
from spmd.core.spec import P, TensorMeta
from spmd.errors import ShardingError

X, Y = torch.ones(2), torch.zeros(3)
TREES = [
    State(X),
    State({"w": X, "b": [Y]}, step=1),
    State(X, mask=Y),
    State(X, step=True),
    State(X, kind=Kind.RIGHT),
    State((X, Y), step=2, mask=State(Y)),
    Frozen(X),
    Frozen(X, sizes=[1, 2]),
    Frozen(X, sizes={"a": ("1", 2)}),
    Fields(X),
    Fields(X, "other"),
    Output(X),
    Output(X, (X, Y)),
    Output(hidden=X),
    Pair(X, Y),
    Pair(X, Y, flag=True),
    Encoding({"ids": X, "mask": Y}),
    Encoding({"mask": Y, "ids": X}),
    {"state": State([Pair(X, Output(Y))])},
]


@pytest.mark.parametrize("tree", TREES, ids=structure_text)
def test_containers_are_taken_apart_and_made_again(tree):
    leaves, structure = tree_leaves(tree), tree_structure(tree)
    assert leaves and all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = structure.unflatten(leaves)
    assert type(tree) is type(again)
    assert structure_text(tree) == structure_text(again)
    assert structure == tree_structure(again) and hash(structure) == hash(tree_structure(again))
    assert all(one is other for one, other in zip(leaves, tree_leaves(again), strict=True))


@pytest.mark.parametrize("tree", TREES, ids=structure_text)
def test_other_trees_have_other_structures_and_generated_code_knows(tree):
    flatten = flattener(tree_structure((tree,)))
    assert all(one is other for one, other in zip(tree_leaves(tree), flatten((tree,)), strict=True))
    for other in TREES:
        if other is not tree:
            assert tree_structure(tree) != tree_structure(other)
            found = flatten((other,))
            assert found is None or not all(isinstance(leaf, torch.Tensor) for leaf in found)


def test_fields_without_tensors_are_kept():
    state = tree_map(lambda x: x + 1, State({"w": X}, step=7, kind=Kind.RIGHT))
    assert (7, None, Kind.RIGHT) == (state.step, state.mask, state.kind)
    assert torch.equal(X + 1, state.params["w"])


def test_fields_that_change_later_change_neither_the_structure_nor_what_is_made_of_it():
    sizes = [1, {"a": 2}]
    structure = tree_structure(Frozen(X, sizes))
    sizes[1]["a"] = 3
    assert structure != tree_structure(Frozen(X, sizes))
    structure.unflatten([X, X]).sizes.append(4)
    assert [1, {"a": 2}] == structure.unflatten([X, X]).sizes


def test_objects_are_made_without_their_init():
    made = tree_structure(Frozen(X)).unflatten([TensorMeta.of(X), TensorMeta((), torch.float32)])
    assert TensorMeta.of(X) == made.w


def test_a_field_without_a_value_stays_without_one():
    @dataclasses.dataclass
    class Late:
        w: torch.Tensor
        cache: torch.Tensor = dataclasses.field(init=False)

    late = Late(X)
    flatten = flattener(tree_structure(late))
    assert [X] == tree_leaves(late) and not hasattr(tree_structure(late).unflatten([Y]), "cache")
    late.cache = Y
    assert 2 == len(tree_leaves(late))
    assert flatten(late) is None


def test_numbers_that_are_equal_but_of_other_types_are_other_structures():
    values = [1, 1.0, True, 1j, -1j, (1,), (True,), [1], {"a": 1}, {"a": 1.0}]
    structures = [tree_structure(State(X, step=value)) for value in values]
    assert len(values) == len(set(structures))


def test_floats_in_fields_are_leaves():
    assert [X, 0.5, 1.0, 2] == tree_leaves(State(X, step=0.5, mask={"betas": (1.0, 2)}))
    assert tree_structure(State(X, step=0.5)) == tree_structure(State(X, step=-0.5))


def test_objects_that_may_hold_tensors_are_leaves():
    for held in (Unknown(X), torch.nn.Linear(2, 2), {X}, [Unknown(X), 3]):
        assert any(
            leaf is held or leaf in (held if isinstance(held, list) else []) for leaf in tree_leaves(State(held))
        )


def test_specs_in_fields_are_leaves():
    assert [P("data"), P()] == tree_leaves(State(P("data"), step=P()))


def test_a_registration_with_optree_counts():
    @dataclasses.dataclass
    class Own:
        w: object
        step: int

    optree.register_pytree_node(
        Own, lambda own: ((own.step, own.w), None), lambda _, values: Own(*reversed(values)), namespace="spmd"
    )
    assert [3, X] == tree_leaves(Own(X, 3))


def test_modules_and_dicts_are_no_dataclasses():
    @dataclasses.dataclass(eq=False)
    class Layer(torch.nn.Module):
        size: int

        def __post_init__(self):
            super().__init__()

    @dataclasses.dataclass
    class Table(dict):
        size: int

    for leaf in (Layer(3), Table(3)):
        assert leaf is tree_leaves(leaf)[0]


def test_paths_read_as_python():
    tree = (State({"w": X}), Output(X, (Y,)), Encoding({"ids": X}), Fields(Y), Pair(X, Y))
    expected = ["0.params['w']", "1['loss']", "1['hidden'][0]", "2['ids']", "3.w", "4[0]", "4[1]"]
    assert expected == flatten_with_paths(tree)[0]


STATE = State({"w": X, "b": Y}, step=3)
PREFIXES = [
    (STATE, P("data"), [P("data")] * 2),
    (STATE, State(P("data")), [P("data")] * 2),
    (STATE, State({"w": P("data"), "b": P()}, step=P(), mask=P("data")), [P(), P("data")]),
    (STATE, {"params": P("data")}, [P("data")] * 2),
    (STATE, {"params": {"w": P("data"), "b": P()}, "step": None}, [P(), P("data")]),
    (State(X, mask=Y), {"params": P("data"), "mask": P()}, [P("data"), P()]),
    (State(X, mask=State([])), {"params": P("data")}, [P("data")]),
    (Frozen(X), {"w": P("data"), "total": P()}, [P("data"), P()]),
    (Output(X, (X, Y)), {"loss": P(), "hidden": P("data")}, [P(), P("data"), P("data")]),
    (Output(X), Output(P("data")), [P("data")]),
    (Encoding({"ids": X, "mask": Y}), {"mask": P(), "ids": P("data")}, [P("data"), P()]),
]


@pytest.mark.parametrize(("tree", "prefix", "expected"), PREFIXES)
def test_prefixes_are_objects_of_the_class_or_dicts_by_field(tree, prefix, expected):
    assert expected == broadcast_prefix(prefix, tree, what="in_specs")


@pytest.mark.parametrize(
    ("tree", "prefix", "text"),
    [
        (STATE, {}, r"expected one spec or a State with fields params \(got a dict with keys \)"),
        (STATE, {"params": P(), "lr": P()}, r"a State with fields params \(got a dict with keys 'lr', 'params'\)"),
        (STATE, State(None), r"at \.params: None is not a spec"),
        (STATE, State({"w": P()}), r"at \.params: expected one spec or a dict with keys 'b', 'w' \(got a dict"),
        (STATE, Fields(P()), r"a State with fields params \(got a Fields with fields w\)"),
        (State(X, mask=Y), {"params": P()}, r"a State with fields params, mask \(got a dict with keys 'params'\)"),
        (Pair(X, Y), {"first": P(), "second": P()}, r"expected one spec or a Pair \(got a dict"),
        (
            Output(X),
            {"hidden": P()},
            r"expected one spec or a Output with keys 'loss' \(got a dict with keys 'hidden'\)",
        ),
        ([Unknown(X)], [Fields(P())], r"at 0: expected one spec for Unknown \(got a Fields"),
    ],
)
def test_prefixes_that_do_not_fit(tree, prefix, text):
    with pytest.raises(ShardingError, match=text) as caught:
        broadcast_prefix(prefix, tree, what="in_specs")
    assert "\n  the arguments: " in str(caught.value)


def test_structure_text():
    assert "State(params={'w': f32[2], 'b': f32[3]})" == structure_text(STATE)
    assert "[Output(loss=f32[2])]" == structure_text([Output(X)])
