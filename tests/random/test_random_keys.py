"""Keys: containers of numbers, which refuse arithmetic and, where that is asked for, a second use."""

from __future__ import annotations

import copy
import pickle
import re

import optree
import pytest
import torch

import spmd
from spmd import P, random
from spmd.api.side_effects import SideEffectWarning

KEY = random.key(4)
KEYS = random.split(KEY, 3)
MESH = spmd.make_mesh({"x": 2}, runtime="virtual")


def test_an_array_of_keys_has_items():
    assert (3, (3,), 1, "philox4x32") == (len(KEYS), KEYS.shape, KEYS.ndim, KEYS.impl)
    assert torch.equal(KEYS.data[1], KEYS[1].data)
    assert torch.equal(KEYS.data[1:], KEYS[1:].data)
    grid = random.split(KEY, (2, 3))
    assert (torch.Size([2]), torch.Size([2, 1, 3])) == (grid[..., 0].shape, grid[:, None].shape)
    assert [True, False, False] == [bool((key == KEYS[0]).all()) for key in KEYS]
    assert (KEYS == KEYS).tolist() == [True] * 3
    assert KEY != random.wrap_key_data(KEY.data, impl="threefry2x32")


def test_keys_are_joined_and_reshaped():
    grid = random.split(KEY, (2, 3))
    assert ((6,), 6, (3, 2)) == (grid.reshape(-1).shape, grid.size, grid.reshape((3, -1)).shape)
    assert torch.equal(grid.data.reshape(6, 2), grid.reshape(6).data) and () == KEYS[:1].reshape(()).shape
    for dim in (0, 1, -1, -2):
        assert torch.stack([grid, grid], dim).shape == torch.stack([torch.ones(2, 3)] * 2, dim).shape
    assert torch.equal(torch.stack([KEYS[0], KEYS[2]]).data, KEYS.data[::2])
    assert (2, 6) == torch.cat([grid, grid], dim=-1).shape
    with pytest.raises(spmd.SpmdError, match=r"6 keys do not fill an array of the shape \(4,\) \(test_random_keys.py"):
        grid.reshape(4)
    with pytest.raises(spmd.SpmdError, match=r"torch.stack at test_random_keys.py:\d+ .*\(got Tensor, philox4x32\)"):
        torch.stack([KEY, torch.ones(2)])


def test_names_of_jax():
    assert torch.equal(KEY.data, random.PRNGKey(4).data) and "philox4x32" == random.key_impl(KEYS)


def test_a_key_that_a_module_keeps_from_a_trace_warns():
    class Drop(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.key = random.key(0)

        def forward(self, x):
            self.key, own = random.split(self.key)
            return random.dropout(own, x, 0.5)

    jitted = spmd.jit(Drop(), P("x"), P("x"), mesh=MESH)
    with pytest.warns(SideEffectWarning, match=r"Drop.key = ... at test_random_keys.py:\d+ .*Return it"):
        jitted(torch.ones(4))


def test_keys_are_containers_and_can_be_copied():
    mapped = optree.tree_map(lambda data: data + 1, {"key": KEY}, namespace="spmd")
    assert torch.equal(KEY.data + 1, mapped["key"].data)
    assert torch.equal(KEY.data, pickle.loads(pickle.dumps(KEY)).data)
    assert torch.equal(KEY.data, copy.deepcopy(KEY).data)
    assert "Key((3,), 'philox4x32')" == repr(KEYS)
    distributed = spmd.distribute(KEYS, P("x"), MESH)
    assert torch.equal(KEYS.data, distributed.data.full_tensor())


def test_keys_are_saved(tmp_path):
    spmd.checkpoint.save({"key": KEY, "step": torch.tensor(3)}, tmp_path / "state")
    found = spmd.checkpoint.load(tmp_path / "state", {"key": random.key(0), "step": torch.tensor(0)})
    assert torch.equal(KEY.data, found["key"].data)


def test_keys_are_saved_by_torch_and_in_states_of_optimizers(tmp_path):
    torch.save({"keys": KEYS}, tmp_path / "state.pt")
    assert torch.equal(KEYS.data, torch.load(tmp_path / "state.pt")["keys"].data)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.state[parameter] = {"key": KEY, "keys": KEYS}
    other = torch.optim.SGD([parameter], 0.1)
    other.load_state_dict(optimizer.state_dict())
    state = other.state[parameter]
    assert all(torch.equal(a.data, b.data) for a, b in ((KEY, state["key"]), (KEYS, state["keys"])))


def test_seeds():
    assert torch.equal(random.key(-1).data, random.key(2**64 - 1).data)
    assert torch.equal(random.key(5).data, random.key(torch.tensor(5, dtype=torch.int32)).data)
    assert torch.equal(random.fold_in(KEY, 2**64 - 1).data, random.fold_in(KEY, -1).data)
    assert torch.equal(random.split(KEY, 9).data[7], random.fold_in(KEY, torch.tensor(7)).data)
    jitted = spmd.jit(lambda seed: random.key(seed), mesh=MESH)
    assert torch.equal(random.key(9).data, jitted(torch.tensor(9)).data.full_tensor())


def test_a_generator_of_torch_makes_keys_and_is_seeded_by_one():
    state = torch.Generator().manual_seed(7)
    first, second = random.from_generator(state), random.from_generator(state, impl="threefry2x32")
    assert ("threefry2x32", False) == (second.impl, torch.equal(first.data, second.data))
    assert torch.equal(first.data, random.from_generator(state.manual_seed(7)).data)
    torch.manual_seed(7)
    draw = lambda: random.normal(random.from_generator(), (5,))  # noqa: E731
    expected = [draw(), draw()]
    torch.manual_seed(7)
    jitted = spmd.jit(draw, None, P("x"), mesh=MESH)
    assert all(torch.equal(value, jitted().full_tensor()) for value in expected)
    one, same, other = (torch.rand(3, generator=random.to_generator(key)) for key in (KEY, KEY, KEYS[0]))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    placed = spmd.distribute(KEY, P(), MESH)
    assert torch.equal(one, torch.rand(3, generator=random.to_generator(placed)))


def test_a_second_use_is_an_error_where_keys_are_checked():
    key = random.key(0)
    with random.check_keys():
        random.normal(key)
        random.fold_in(key, 1)
        with pytest.raises(
            spmd.SpmdError, match=r"split at test_random_keys.py:\d+ uses a key that spmd.random.normal at"
        ):
            random.split(key)
        keys = random.split(random.key(1))
        random.uniform(keys[0])
        random.permutation(keys[1], 100)
        with pytest.raises(spmd.SpmdError, match=r"spmd\.random\.bits at .* has used"):
            random.bits(keys[0])
        with pytest.raises(spmd.SpmdError, match=r"spmd\.random\.bits at .* has used"):
            random.bits(keys[-2])
        grid = random.split(random.key(2), (2, 2))
        random.bits(grid[0, 1])
        with pytest.raises(spmd.SpmdError, match=r"spmd\.random\.bits at .* has used"):
            random.bits(grid[0][-1])
        for own in keys[1:]:
            random.randint(own, (), 0, 3)
    random.normal(key)
    assert torch.equal(random.normal(key), random.normal(key))


def test_a_second_use_in_a_trace():
    def twice(key):
        return random.normal(key) + random.uniform(key)

    jitted = spmd.jit(twice, mesh=MESH)
    with random.check_keys(), pytest.raises(spmd.SpmdError, match=r"spmd\.random\.uniform at test_random_keys"):
        jitted(KEY)
    assert torch.equal(twice(KEY), jitted(KEY).full_tensor())


MISTAKES = {
    "sum": (lambda: KEY + 1, "__add__ of a key at test_random_keys.py"),
    "reflected": (lambda: 1 - KEY, "has no arithmetic"),
    "power": (lambda: KEY**2, "split"),
    "matmul": (lambda: KEY @ KEYS, "__matmul__ of a key"),
    "negation": (lambda: -KEY, "spmd.random.key_data"),
    "order": (lambda: KEY < KEYS, "__lt__ of a key"),
    "truth": (lambda: bool(KEY), "__bool__ of a key"),
    "number": (lambda: int(KEY), "__int__ of a key"),
    "function of torch": (lambda: torch.add(torch.ones(2), KEY), "add of a key"),
    "in a trace": (lambda: spmd.jit(lambda key: key * 2, mesh=MESH)(KEY), "__mul__ of a key at test_random_keys.py"),
    "int for a key": (
        lambda: random.normal(3),
        r"expects a key as its first argument \(got int\). Make .* spmd.random.key\(3\)",
    ),
    "tensor for a key": (lambda: random.uniform(torch.ones(2)), "wrap_key_data"),
    "generator for a key": (lambda: random.bits(torch.Generator()), r"from_generator\(x\).*initial_seed"),
    "generator for a seed": (lambda: random.key(torch.Generator()), r"got Generator.*from_generator\(x\)"),
    "seed for a generator": (lambda: random.from_generator(3), r"expects a torch.Generator \(got int\)"),
    "generator in a trace": (
        lambda: spmd.jit(lambda key: torch.rand(2, generator=random.to_generator(key)), mesh=MESH)(KEY),
        "needs the values",
    ),
    "shape for a key": (lambda: random.normal((3, 4)), "got tuple"),
    "array of keys": (lambda: random.normal(KEYS), r"expects a single key \(got an array \(3,\)\).*vmap"),
    "split of an array": (
        lambda: random.split(KEYS),
        "spmd.random.split at test_random_keys.py.* expects a single key",
    ),
    "items of one key": (lambda: KEY[0], "A single key has no items"),
    "unpacked key": (lambda: tuple(KEY), "A single key has no length"),
    "item beyond": (lambda: KEYS[5], "out of bounds"),
    "words of a key": (lambda: KEYS[0, 1], "too many indices"),
    "impl": (lambda: random.key(0, impl="pcg64"), "must be one of 'philox4x32', 'threefry2x32'"),
    "float seed": (lambda: random.key(0.5), "must be an integer"),
    "large seed": (lambda: random.key(2**64), "64 bits at most"),
    "seeds": (lambda: random.key(torch.arange(3)), "must be one integer"),
    "key data": (lambda: random.wrap_key_data(torch.ones(2)), r"integers \[keys..., 2\] \(got torch.float32"),
    "three words": (lambda: random.wrap_key_data(torch.arange(3)), r"\(got torch.int64 \(3,\)\)"),
    "folded float": (lambda: random.fold_in(KEY, 0.5), "fold_in at test_random_keys.py.* expects one integer"),
    "folded tensor": (lambda: random.fold_in(KEY, torch.arange(2)), r"\(got torch.int64 \(2,\)\)"),
    "negative length": (lambda: random.normal(KEY, (-1,)), r"shape of spmd.random.normal at .* \(got \(-1,\)\)"),
    "length": (lambda: random.uniform(KEY, (2.0,)), "must be a tuple of lengths"),
    "count of keys": (lambda: random.split(KEY, "2"), "num of spmd.random.split"),
    "lengths in place of a shape": (lambda: random.normal(KEY, 2, 3), r"dtype of spmd.random.normal at .* \(got 3\)"),
    "integers of floats": (lambda: random.randint(KEY, (2,), 0, 9, torch.float32), "must be one of integers"),
    "floats of integers": (lambda: random.uniform(KEY, (2,), torch.int32), "must be floating"),
    "signed bits": (lambda: random.bits(KEY, (2,), torch.int32), "torch.uint8, torch.uint16"),
    "ends": (lambda: random.randint(KEY, (2,), 0, 2**33), "at most 2\\^32 apart"),
    "end of a dtype": (lambda: random.randint(KEY, (2,), 0, 300, torch.uint8), "fit in torch.uint8"),
    "end of floats": (
        lambda: random.randint(KEY, (2,), 0, 1.5),
        "maxval of spmd.random.randint at .* must be an integer",
    ),
    "end of another shape": (
        lambda: random.uniform(KEY, (2,), None, torch.zeros(3)),
        r"minval \(3,\) of spmd.random.uniform",
    ),
    "probability": (lambda: random.bernoulli(KEY, 1.5), r"must be a probability \(got 1.5\)"),
    "probability of dropout": (lambda: random.dropout(KEY, torch.ones(2), -0.1), "p of spmd.random.dropout at"),
    "dropout of integers": (lambda: random.dropout(KEY, torch.arange(2)), "must be a tensor of floats"),
    "order of arguments": (lambda: random.dropout(torch.ones(2), KEY), "expects a key as its first argument"),
    "choices": (lambda: random.choice(KEY, 3, (4,), replace=False), "cannot choose 4 of 3 items without replacement"),
    "probabilities": (lambda: random.choice(KEY, 3, p=torch.ones(2)), r"must have shape \(3,\) \(got \(2,\)\)"),
    "dim of items": (lambda: random.choice(KEY, torch.ones(2), axis=1), "there is no dim 1"),
    "permuted": (lambda: random.permutation(KEY, "abc"), "expects a count, or a tensor"),
    "logits": (lambda: random.categorical(KEY, torch.arange(3)), "expects floats with the dim"),
    "shape of categories": (lambda: random.categorical(KEY, torch.ones(2, 3), shape=(3,)), r"must end with \(2,\)"),
    "categories": (
        lambda: random.categorical(KEY, torch.ones(3), shape=(4,), replace=False),
        "cannot choose 4 of 3 positions",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_have_clear_errors(name):
    call, text = MISTAKES[name]
    with pytest.raises((spmd.SpmdError, IndexError)) as raised:
        call()
    assert re.search(text, str(raised.value), re.DOTALL)
