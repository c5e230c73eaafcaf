"""The generators against what others draw: known answers, JAX's record, moments; and boxes of a draw."""

from __future__ import annotations

import json
import math
import random
from itertools import product
from pathlib import Path

import pytest
import torch

import spmd
from spmd.random.generators.draw import DRAW, contiguous_strides
from spmd.random.generators.implementations import GENERATORS
from spmd.random.generators.philox import WORD

RECORD = json.loads((Path(__file__).parent / "jax_random.json").read_text())
SHAPES = {"scalar": (), "1": (1,), "4": (4,), "3x5": (3, 5), "2x3x4": (2, 3, 4), "33": (33,)}

FUNCTIONS = {
    "uniform_-2_3_17": lambda key: spmd.random.uniform(key, (17,), None, -2.0, 3.0),
    "bernoulli_0.3_21": lambda key: spmd.random.bernoulli(key, 0.3, (21,)),
    "randint_0_10_19": lambda key: spmd.random.randint(key, (19,), 0, 10),
    "randint_-5_1000003_8": lambda key: spmd.random.randint(key, (8,), -5, 1000003),
    "truncated_normal_-1_2_9": lambda key: spmd.random.truncated_normal(key, -1.0, 2.0, (9,)),
    "gumbel_9": lambda key: spmd.random.gumbel(key, (9,)),
    "exponential_9": lambda key: spmd.random.exponential(key, (9,)),
    "permutation_13": lambda key: spmd.random.permutation(key, 13),
    "categorical_logits_0_1_2_3_n7": lambda key: spmd.random.categorical(key, torch.arange(4.0), shape=(7,)),
    "choice_10_n4": lambda key: spmd.random.choice(key, 10, (4,)),
    "split_2": lambda key: spmd.random.key_data(spmd.random.split(key)),
    "split_5": lambda key: spmd.random.key_data(spmd.random.split(key, 5)),
    "fold_in_3": lambda key: spmd.random.key_data(spmd.random.fold_in(key, 3)),
    "key_data": spmd.random.key_data,
    **{f"bits_{name}": lambda key, size=size: spmd.random.bits(key, size).long() for name, size in SHAPES.items()},
    **{f"uniform_{name}": lambda key, size=size: spmd.random.uniform(key, size) for name, size in SHAPES.items()},
    **{f"normal_{name}": lambda key, size=size: spmd.random.normal(key, size) for name, size in SHAPES.items()},
}  # fmt: skip


@pytest.mark.parametrize("case", RECORD["cases"], ids=lambda case: f"seed{case['seed']}")
def test_threefry_draws_what_jax_draws(case):
    key = spmd.random.key(case["seed"], impl="threefry2x32")
    assert FUNCTIONS.keys() | {"seed"} == case.keys()
    for name, function in FUNCTIONS.items():
        expected, actual = torch.tensor(case[name]), function(key)
        if not actual.is_floating_point() or (name.startswith("uniform_") and "-" not in name):
            assert torch.equal(expected, actual), name
        else:  # JAX has polynomials of its own for log and erfinv, and fuses a product and a sum
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, msg=name)


def reference_philox(counter, key):
    """The words of Philox4x32-10 of four words and two, by Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & WORD, first >> 32 ^ c[3] ^ k[1], first & WORD]
        k = [k[0] + 0x9E3779B9 & WORD, k[1] + 0xBB67AE85 & WORD]
    return c


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("0 0 0 0 0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_reference_has_the_known_answers_of_random123(given, words):
    numbers = [int(word, 16) for word in given.split()]
    assert words.split() == [f"{word:08x}" for word in reference_philox(numbers[:4], numbers[4:])]


def test_words_of_philox_are_those_of_counters_in_order():
    seed, offset = 2**64 - 5, 2**64 - 2  # the counter wraps
    key = spmd.random.wrap_key_data(torch.tensor([seed - 2**64, offset - 2**64]))
    counters = [(offset + block) % 2**64 for block in range(4)]
    key_words = seed & WORD, seed >> 32
    words = [word for c in counters for word in reference_philox((c & WORD, c >> 32, 0, 0), key_words)]
    draw = lambda dtype, count: spmd.random.bits(key, (count,), dtype).tolist()  # noqa: E731
    assert words == draw(torch.uint32, 16)
    assert [words[i] << 32 | words[i + 1] for i in range(0, 16, 2)] == draw(torch.uint64, 8)
    assert [half for word in words for half in (word & 0xFFFF, word >> 16)] == draw(torch.uint16, 32)
    assert [word >> shift & 0xFF for word in words for shift in (0, 8, 16, 24)] == draw(torch.uint8, 64)
    assert [(word >> 9) * 2.0**-23 for word in words] == spmd.random.uniform(key, (16,)).tolist()
    pairs = [
        (words[0] | words[1] << 32, words[2] | words[3] << 32),
        (words[4] | words[5] << 32, words[6] | words[7] << 32),
    ]
    assert pairs == [tuple(map(int, pair)) for pair in spmd.random.split(key).data.view(torch.uint64).tolist()]


KINDS = [
    ("bits", torch.int8), ("bits", torch.int16), ("bits", torch.int32), ("bits", torch.int64),
    ("uniform", torch.float32), ("uniform", torch.float64), ("uniform", torch.bfloat16), ("uniform", torch.float16),
    ("normal", torch.float32), ("normal", torch.float64), ("normal", torch.bfloat16),
    ("gumbel", torch.float32), ("exponential", torch.float64), ("mask", torch.int8),
]  # fmt: skip


@pytest.mark.parametrize(("impl", "kind"), list(product(GENERATORS, KINDS)), ids=str)
def test_an_element_depends_on_its_index_only(impl, kind, monkeypatch):
    monkeypatch.setattr("spmd.random.generators.draw._BLOCK", 32)
    key, choices = spmd.random.key(2**40 + 3, impl=impl).data, random.Random(0)
    for shape in ((7, 5, 6), (61, 33), (8, 16), (1500,)):
        whole, strides = DRAW(key, shape, *kind, impl), contiguous_strides(shape)
        for _ in range(6):
            low = [choices.randrange(length) for length in shape]
            high = [choices.randrange(first, length) + 1 for first, length in zip(low, shape, strict=True)]
            start = torch.tensor(sum(map(math.prod, zip(low, strides, strict=True))))
            size = [after - before for before, after in zip(low, high, strict=True)]
            box = DRAW(key, size, *kind, impl, strides, start)
            assert torch.equal(whole[tuple(map(slice, low, high))], box)


@pytest.mark.parametrize("impl", GENERATORS)
def test_each_key_of_a_batch_draws_as_it_does_alone(impl):
    keys = spmd.random.split(spmd.random.key(3, impl=impl), (2, 3))
    alone = [[spmd.random.normal(key, (4, 5)) for key in row] for row in keys]
    draw = torch.func.vmap(torch.func.vmap(lambda key: spmd.random.normal(key, (4, 5))))
    assert torch.equal(torch.stack([torch.stack(row) for row in alone]), draw(keys))
    folded = torch.func.vmap(spmd.random.fold_in, in_dims=(None, 0))(keys[0, 0], torch.arange(3))
    assert torch.equal(spmd.random.split(keys[0, 0], 3).data, folded.data)


def chi_square(counts):
    """The statistic of equal probabilities, in standard deviations from its mean."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return float(((counts - expected).square().sum() / expected - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("impl", GENERATORS)
def test_integers_and_floats_have_their_distributions(impl):
    key, count = spmd.random.key(2024, impl=impl), 2**16
    one, two, three = spmd.random.split(key, 3)
    counts = [
        torch.bincount(spmd.random.bits(one, (count,), torch.uint8).long(), minlength=256),
        torch.bincount(spmd.random.bits(two, (count,)).long() >> 24, minlength=256),
        torch.bincount((spmd.random.uniform(three, (count, 2)) * 16).long() @ torch.tensor([16, 1]), minlength=256),
        torch.bincount(spmd.random.randint(one, (count,), 0, 7), minlength=7),
        torch.bincount(torch.func.vmap(lambda key: spmd.random.bits(key, (), torch.uint8).view(torch.int8))(
            spmd.random.split(two, count)).long() + 128, minlength=256),
    ]  # fmt: skip
    assert all(abs(chi_square(found.double())) < 4 for found in counts)
    normal, log = spmd.random.normal(one, (count,), torch.float64), spmd.random.gumbel(two, (count,), torch.float64)
    exponential = spmd.random.exponential(three, (count,), torch.float64)
    moments = [
        (normal.mean(), 0, 1), (normal.square().mean(), 1, 2), (normal.pow(3).mean(), 0, 15),
        (normal.pow(4).mean(), 3, 96), ((normal[1:] * normal[:-1]).mean(), 0, 1), (exponential.mean(), 1, 1),
        (exponential.square().mean(), 2, 20), (log.mean(), 0.5772156649, math.pi**2 / 6),
    ]  # fmt: skip
    assert all(abs(found - mean) < 4 * math.sqrt(variance / count) for found, mean, variance in moments)


STREAMS = {
    "one key": lambda key, n: spmd.random.bits(key, (n, n)),
    "split": lambda key, n: torch.func.vmap(lambda own: spmd.random.bits(own, (n,)).view(torch.int32))(
        spmd.random.split(key, n)),
    "chain": lambda key, n: spmd.scan(
        lambda key, _: (lambda pair: (pair[0], spmd.random.bits(pair[1], (n,)).view(torch.int32)))(
            spmd.random.split(key)), key, None, length=n)[1],
    "folded": lambda key, n: torch.func.vmap(lambda own: torch.func.vmap(
        lambda layer: spmd.random.bits(spmd.random.fold_in(own, layer), ()).view(torch.int32))(torch.arange(n)))(
        torch.func.vmap(spmd.random.fold_in, in_dims=(None, 0))(key, torch.arange(n))),
}  # fmt: skip


@pytest.mark.parametrize(("stream", "impl"), list(product(STREAMS, GENERATORS)))
def test_words_of_streams_are_serially_independent(stream, impl):
    side = 256
    words = STREAMS[stream](spmd.random.key(77, impl=impl), side).view(torch.int32).long() & WORD
    by_key = words.reshape(side, side).double() / 2**32
    for x in (by_key.flatten(), by_key.T.flatten()):  # neighbours of one key, and of neighbouring keys
        centred, count = x - 0.5, x.numel()
        for lag in (1, 2, 3, 4, 5, 7, 8, 16, 64, side):
            products = centred[lag:] * centred[:-lag]
            assert abs(products.sum()) < 4.5 * math.sqrt(len(products)) / 12, (lag, products.mean())
        rises = (x[1:] > x[:-1]).double()
        turns = 1 + (rises[1:] != rises[:-1]).sum()  # runs up and down, with their known mean and variance
        assert abs(turns - (2 * count - 1) / 3) < 4.5 * math.sqrt((16 * count - 29) / 90)
        high = x > 0.5
        runs = 1 + (high[1:] != high[:-1]).sum()
        assert abs(runs - (count + 1) / 2) < 4.5 * math.sqrt(count / 4)
        pairs = torch.bincount((x[::2] * 16).long() * 16 + (x[1::2] * 16).long(), minlength=256)
        assert abs(chi_square(pairs.double())) < 4.5
    ones = torch.stack([(words >> bit & 1).double().mean() for bit in range(32)])
    assert (ones - 0.5).abs().max() < 4.5 / (2 * side)


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("impl", GENERATORS)
def test_offsets_across_the_edges_of_blocks(impl, count):
    key, choices = spmd.random.key(12, impl=impl).data, random.Random(3)
    per = GENERATORS[impl].per_counter(32)
    edges = [2**15 * per * number for number in (1, 2)]
    for kind in ("normal", "gumbel", "exponential"):
        whole = DRAW(key, [edges[1] + 300], kind, torch.float32, impl)
        for _ in range(count):
            low = choices.choice(edges) - choices.randrange(280)
            size = choices.randrange(1, min(560, len(whole) - low))
            found = DRAW(key, [size], kind, torch.float32, impl, [1], torch.tensor(low))
            assert torch.equal(whole[low : low + size], found), (kind, low, size)


def test_a_dropped_share_is_the_rounded_probability():
    dropped = spmd.random.dropout(spmd.random.key(1), torch.ones(2**16), 0.1)
    level = round(0.1 * 2**16)
    assert torch.equal(torch.tensor([0.0, 2**16 / (2**16 - level)]), dropped.unique())
    assert abs((dropped == 0).double().mean() - level / 2**16) < 4 * math.sqrt(0.09 / 2**16)
    x = torch.randn(3)
    assert x is spmd.random.dropout(spmd.random.key(1), x, 0.0)
    assert torch.equal(torch.zeros(3), spmd.random.dropout(spmd.random.key(1), x, 1.0))
