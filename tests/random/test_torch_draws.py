"""Torch's random operators with `rng="counter"`: equal on every mesh, and each rank draws its shard."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from sampling import sample
from torch import distributions, nn
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import P

MESHES = {
    "1": {"x": 1},
    "2": {"x": 2},
    "3": {"x": 3},
    "8": {"x": 8},
    "2x4": {"x": 2, "y": 4},
    "2x2x2": dict.fromkeys("xyz", 2),
}
X = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))


def mesh_of(name):
    return spmd.make_mesh(MESHES[name], runtime="virtual")


def by_counter(function, in_specs, out_specs, name, **options):
    return spmd.jit(function, in_specs, out_specs, mesh=mesh_of(name), rng="counter", **options)


def full(function, *args, seed=3):
    """The results of a call after a seed."""
    torch.manual_seed(seed)
    return [y.full_tensor() for y in function(*args)]


def factories(x):
    return [
        torch.rand(7, 6), torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.complex64),
        torch.randint(3, 9, (7, 6)), torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 4),
        torch.rand(7, 6, dtype=torch.bfloat16), torch.normal(1.0, 2.0, (7, 6)), torch.normal(x, 2.0),
    ]  # fmt: skip


def in_place(x):
    made = lambda dtype=torch.float32: torch.empty(7, 6, dtype=dtype)  # noqa: E731
    return [
        made().uniform_(-1, 2), made().normal_(1, 2), made().exponential_(2.0), made().cauchy_(),
        made().geometric_(0.2), made().log_normal_(), made(torch.int64).random_(),
        made(torch.int64).random_(-(2**63), None),
        made(torch.uint8).random_(), made(torch.bool).random_(), made().random_(5), made(torch.float16).normal_(),
        made().t().uniform_().t(), torch.rand(7, 6, out=made()),
    ]  # fmt: skip


def layers(x):
    return [
        F.dropout(x, 0.3), F.dropout(x), F.alpha_dropout(x, 0.2, True), F.feature_alpha_dropout(x[None], 0.2, True)[0],
        F.dropout1d(x, 0.3), F.rrelu(x, training=True), F.gumbel_softmax(x),
        torch.native_dropout(x, 0.2, True)[0], F.dropout(x, 0.0), F.dropout(x, 1.0),
    ]  # fmt: skip


def from_values(x):
    p = torch.softmax(x, -1)
    return [torch.bernoulli(p), torch.empty_like(x).bernoulli_(p), torch.bernoulli(x, 0.25), torch.multinomial(p, 1)]


FUNCTIONS = {function.__name__: function for function in (factories, in_place, layers, from_values)}


def expected_of(function):
    return full(by_counter(function, P(), P(), "1"), X)


@pytest.mark.parametrize(
    "case",
    sample(
        [*product(MESHES, FUNCTIONS)],
        [("3", "factories"), ("2x4", "in_place"), ("2x2x2", "layers"), ("3", "from_values")],
    ),
)
def test_numbers_are_equal_on_every_mesh_and_nothing_is_sent(case):
    name, function = case[0], FUNCTIONS[case[1]]
    expected = expected_of(function)
    specs = [P(tuple(MESHES[name]))]
    if case[1] in ("factories", "in_place"):  # a softmax over columns sends
        specs.append(P(None, "x") if len(MESHES[name]) == 1 else P("y", "x"))
    for spec in specs:
        jitted = by_counter(function, spec, spec, name)
        assert () == jitted.plan(X).comms
        assert all(map(torch.equal, expected, full(jitted, X)))


def test_a_mesh_with_empty_shards():
    draw = lambda x: [torch.rand(3, 2), F.dropout(x)]  # noqa: E731
    x = torch.ones(3, 2)
    expected = full(by_counter(draw, P(), P(), "1"), x)
    assert all(map(torch.equal, expected, full(by_counter(draw, P("x"), P("x"), "8"), x)))


def initialized(x):
    weights = nn.init.xavier_uniform_(torch.empty(4, 5)), nn.init.kaiming_normal_(torch.empty(4, 5))
    cut = nn.init.trunc_normal_(torch.empty(4, 5), 1.0, 2.0, 0.0, 1.5)
    return [*weights, cut, nn.init.sparse_(torch.empty(4, 5), 0.3), nn.Linear(4, 5).weight, torch.randperm(9)]


def distributed(x):
    p = torch.softmax(x, -1)
    return [
        torch.multinomial(p, 3), torch.multinomial(p, 30, replacement=True), distributions.Normal(x, 1.0).rsample(),
        distributions.Categorical(logits=x).sample((2,)), distributions.Laplace(x, 1.0).rsample(),
        distributions.Uniform(x, x + 1).sample(), distributions.Bernoulli(p).sample(),
        distributions.Gamma(p, 2.0).rsample(), distributions.Beta(p, p + 1).sample(),
        distributions.Dirichlet(p).sample(), distributions.StudentT(p + 1).sample(),
    ]  # fmt: skip


def recurrent(x):
    lstm = nn.LSTM(6, 5, 2, dropout=0.5)
    return [lstm(x[None])[0], F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)]


MODELS = {function.__name__: function for function in (initialized, distributed, recurrent)}


@pytest.mark.parametrize("case", sample([*product(MESHES, MODELS)], [*product(["2x4"], MODELS)]))
def test_initializers_distributions_and_models_on_meshes(case):
    function = MODELS[case[1]]
    for value, found in zip(expected_of(function), full(by_counter(function, P("x"), P(), case[0]), X), strict=True):
        torch.testing.assert_close(found, value)


def test_a_call_draws_other_numbers_and_a_seed_the_same():
    jitted = by_counter(lambda x: [F.dropout(x), torch.rand(4), torch.rand(4)], P("x"), None, "2")
    first, second = full(jitted, X), [y.full_tensor() for y in jitted(X)]
    assert not any(map(torch.equal, first, second))
    assert not torch.equal(first[1], first[2])
    assert all(map(torch.equal, first, full(jitted, X)))
    assert not any(map(torch.equal, first, full(jitted, X, seed=4)))


def test_a_program_without_draws_leaves_the_generator():
    def step(x):
        unused = torch.rand(5)
        return spmd.scan(lambda total, row: (total + row, unused.shape[0]), x[0], x)[0]

    jitted = by_counter(step, P("x"), P(), "2")
    state = torch.get_rng_state()
    jitted(X)
    assert torch.equal(state, torch.get_rng_state())


def test_samples_are_those_of_their_distributions():
    count = 40_000
    x = torch.zeros(count)
    functions = [
        lambda: torch.rand(count), lambda: torch.randn(count), lambda: torch.empty(count).exponential_(2.0),
        lambda: torch.empty(count).geometric_(0.3), lambda: torch.empty(count).log_normal_(0.1, 0.5),
        lambda: torch.empty(count).bernoulli_(0.3), lambda: torch.empty(count, dtype=torch.int64).random_(3, 10),
        lambda: F.dropout(torch.ones(count), 0.3), lambda: F.alpha_dropout(torch.randn(count), 0.3, True),
        lambda: nn.init.trunc_normal_(torch.empty(count), 0.5, 1.0, 0.0, 2.0),
        lambda: torch.multinomial(torch.tensor([[0.2, 0.0, 0.8]]).expand(count, 3), 1).double(),
        lambda: torch.multinomial(torch.tensor([0.2, 0.0, 0.8]), count, replacement=True).double(),
        lambda: torch.multinomial(torch.tensor([[0.2, 0.1, 0.7]]).expand(count, 3), 2).double()[:, 1],
    ]  # fmt: skip
    torch.manual_seed(0)
    expected = [function().double() for function in functions]
    found = full(by_counter(lambda x: [function().double() for function in functions], P(), P(), "1"), x)
    for value, other in zip(expected, found, strict=True):
        error = 5 * value.std() / math.sqrt(count)
        assert abs(value.mean() - other.mean()) < 2 * error
        assert abs(value.std() / other.std() - 1) < 0.05


@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0, 3.0, 200.0])
def test_gamma_numbers_have_the_distribution_of_torch(alpha):
    count = 20_000
    x = torch.full((count, 2), alpha)
    draw, differentiated = torch._standard_gamma, torch.func.grad(lambda x: torch._standard_gamma(x).sum())
    jitted = by_counter(lambda x: [draw(x), torch._sample_dirichlet(x)], P("x"), P("x"), "3")
    assert () == jitted.plan(x).comms
    gamma, dirichlet = full(jitted, x)
    for found, expected in ((gamma, draw(x)), (dirichlet, torch._sample_dirichlet(x))):
        for column in (0, 1):
            values, others = (y[:, column].sort().values for y in (found, expected))
            # the statistic of Kolmogorov and Smirnov, which is larger once in 10^5 times
            steps = torch.searchsorted(values, others, right=True) - torch.arange(1, count + 1)
            if alpha > 0.1:  # torch's smallest numbers are equal, too
                assert steps.abs().max() < 2.5 * math.sqrt(2 * count)
        torch.testing.assert_close(found.mean(), expected.mean(), rtol=0.02 + 0.05 / alpha**0.5, atol=0)
    slopes, theirs = full(lambda x: [by_counter(differentiated, P("x"), P("x"), "2")(x)], x)[0], differentiated(x)
    torch.testing.assert_close(slopes.mean(), theirs.mean(), rtol=0.05, atol=0)


def scanned(x):
    def step(total, row):
        return total + F.dropout(row).sum(), torch.rand(3) * row.sum()

    total, rows = spmd.scan(step, x.sum() * 0, x)
    return total + rows.square().sum()


def nested(x):
    def outer(total, row):
        return spmd.scan(lambda t, y: ((t + F.dropout(y)).sin(), None), total, row.reshape(3, 2).sum(1))[0], None

    return spmd.scan(outer, x.new_ones(()), x)[0]


def counted(x):
    return spmd.fori_loop(0, 3, lambda number, y: y + torch.rand(y.shape) * x, torch.zeros_like(x)).sum()


def chosen(x):
    return spmd.cond(x.sum() > 0, lambda x: F.dropout(x).sum(), lambda x: (x * torch.rand(x.shape)).sum(), x)


def recomputed(x):
    return checkpoint(lambda x: F.dropout(x, 0.3).sin(), x, use_reentrant=False).square().sum()


def different(x):
    return torch.func.vmap(lambda row: F.dropout(row) * torch.rand(6), randomness="different")(x).square().sum()


def same(x):
    return torch.func.vmap(lambda row: F.dropout(row) * torch.rand(6), randomness="same")(x).square().sum()


def twice_differentiated(x):
    return torch.func.grad(lambda x: (F.dropout(x).sin() ** 2).sum())(x).square().sum()


CONSTRUCTS = {
    function.__name__: function
    for function in (scanned, nested, counted, chosen, recomputed, different, same, twice_differentiated)
}


@pytest.mark.parametrize("case", sample([*product(MESHES, CONSTRUCTS)], [*product(["3"], CONSTRUCTS)]))
def test_gradients_through_loops_and_transforms(case):
    function = CONSTRUCTS[case[1]]
    differentiated = torch.func.grad_and_value(function)
    expected = full(by_counter(differentiated, P(), P(), "1"), X)
    for value, found in zip(expected, full(by_counter(differentiated, P("x"), P(), case[0]), X), strict=True):
        torch.testing.assert_close(found, value)
    outside = by_counter(function, P("x"), P(), "2")
    torch.manual_seed(3)
    torch.testing.assert_close(torch.func.grad(outside)(X), expected[0])
    torch.manual_seed(3)
    with spmd.disable_jit():
        torch.testing.assert_close(outside(X).full_tensor(), expected[1])


def test_trips_and_unrolled_trips_draw_alike():
    def run(x, **options):
        def step(carry, row):
            return (carry * F.dropout(row, 0.2)).sin(), torch.rand(3)

        return [*spmd.scan(step, x[0], x, **options)]

    expected = full(by_counter(run, P(), P(), "1"), X)
    assert len(expected[1].unique()) == expected[1].numel()
    for options in ({"unroll": True}, {"unroll": 2}, {"segments": 2}):
        found = full(by_counter(lambda x, options=options: run(x, **options), P("x"), P(), "2"), X)
        torch.testing.assert_close(found, expected)


def test_while_loops_draw_by_trip():
    def run(x):
        step = lambda carry: (carry[0].roll(1) * 0 + torch.rand(4), carry[1] + 1, carry[0])  # noqa: E731
        return spmd.while_loop(lambda carry: carry[1] < 3, step, (torch.zeros(4), torch.tensor(0), torch.zeros(4)))

    last, _, before = full(by_counter(run, P("x"), P(), "2"), X)
    assert not torch.equal(last, before)
    torch.manual_seed(3)
    with spmd.disable_jit():
        assert torch.equal(last, by_counter(run, P("x"), P(), "2")(X)[0].full_tensor())


def test_a_checkpointed_draw_is_not_held():
    def loss(x, holds):
        drop = lambda x: (F.dropout(x, 0.3).sin() * torch.randn(x.shape)).cos()  # noqa: E731
        x = drop(x) if holds else checkpoint(drop, x, use_reentrant=False)
        return (drop(x) if holds else checkpoint(drop, x, use_reentrant=False)).square().sum()

    def peak(holds):
        return by_counter(torch.func.grad(lambda x: loss(x, holds)), P("x"), P("x"), "2").plan(x).memory.peak

    x = torch.ones(1024, 256)
    assert peak(False) < peak(True)
    held, again = (full(by_counter(lambda x, h=h: [torch.func.grad(loss)(x, h)], P("x"), None, "2"), x) for h in (1, 0))
    torch.testing.assert_close(held, again)


def test_in_a_manual_region_all_ranks_draw_the_same():
    body = lambda x: F.dropout(x) + torch.rand(x.shape)  # noqa: E731
    mapped = lambda x: [spmd.shard_map(body, None, P("x"), P("x"))(x)]  # noqa: E731
    x = torch.ones(4, 6)
    (found,) = full(by_counter(mapped, P("x"), P("x"), "2"), x)
    assert torch.equal(*found.chunk(2))
    torch.manual_seed(3)
    with spmd.disable_jit():
        assert torch.equal(found, by_counter(mapped, P("x"), P("x"), "2")(x)[0].full_tensor())


def test_memory_and_numbers_of_a_rank_are_those_of_its_shard():
    x = spmd.TensorMeta((1024, 1024), torch.float32)
    peaks = [by_counter(F.dropout, P("x"), P("x"), name).plan(x).memory.peak for name in ("1", "2", "8")]
    assert all(peak < 1.05 * peaks[0] / ranks for peak, ranks in zip(peaks, (1, 2, 8), strict=True))
    text = by_counter(F.dropout, P("x"), P("x"), "8").lower(x).as_text()
    assert "draw(derive_key_1, [128, 1024], 'bits'" in text


def forked(x):
    first = torch.rand(4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        seeded = torch.rand(4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            again, inside = torch.rand(4), torch.rand(4)
        second = torch.rand(4)
    with torch.random.fork_rng(devices=[]):
        ahead = torch.rand(4)
    return [first, seeded, again, inside, second, ahead, torch.rand(4)]


def test_forks_and_seeds_inside_mean_what_they_mean_on_one_device():
    equal = lambda values: [[torch.equal(x, y) for x in values] for y in values]  # noqa: E731
    jitted = by_counter(forked, P("x"), None, "2")
    found, other = full(jitted, X), [y.full_tensor() for y in jitted(X)]
    assert equal(forked(X)) == equal(found)
    assert torch.equal(found[1], other[1]), "a seed in the function is that of each call"
    assert not torch.equal(found[0], other[0])


def test_a_fork_around_draws_from_torchs_generator_is_refused():
    def function(x):
        with torch.random.fork_rng(devices=[]):
            torch.rand(4)
        return torch.rand(4)

    with pytest.raises(spmd.TraceError, match=r"set back at test_torch_draws.py:\d+ .*rng=\"counter\""):
        spmd.jit(function, P("x"), None, mesh=mesh_of("2"))(X)


REFUSED = {
    "generator": (lambda x: torch.rand(4, generator=torch.Generator()), r"torch.Generator of its own.*random.key"),
    "poisson": (lambda x: torch.poisson(x.abs()), r"poisson.* has no form by a key.*rng=\"torch\""),
    "seeded": (lambda x: [torch.manual_seed(0), torch.rand(4)][1], r"changes torch's random generator at"),
    "state": (lambda x: [torch.set_rng_state(STATE), torch.rand(4)][1], r"state of a generator is set at .*fork_rng"),
    "high": (lambda x: torch.randint_like(x, torch.tensor(4)), "no form by a key"),
}
STATE = torch.Generator().manual_seed(7).get_state()


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_key_draws_is_refused(name):
    function, message = REFUSED[name]
    with pytest.raises(spmd.TraceError, match=message):
        by_counter(function, P("x"), None, "2")(X)


def test_rng_is_one_of_two():
    with pytest.raises(spmd.PlanError, match="rng must be one of 'torch', 'counter'"):
        spmd.jit(F.dropout, rng="philox")


def test_a_large_whole_draw_warns_at_its_line():
    function = lambda x: [torch.rand(4100, 4000) * x[0, 0], torch.rand(3)]  # noqa: E731
    with pytest.warns(UserWarning, match=r'Each rank draws f32\[4100,4000\], 65.6 MB, whole.*rng="counter"') as found:
        spmd.jit(function, P("x"), None, mesh=mesh_of("2")).plan(X)
    assert __file__ == found[0].filename
    by_counter(function, P("x"), None, "2").plan(X)


def test_attention_with_dropout_warns_of_its_weights():
    q = spmd.TensorMeta((2, 4, 2048, 8), torch.float32)
    function = lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)  # noqa: E731
    with pytest.warns(UserWarning, match=r"computes its weights f32\[2,4,2048,2048\], 134 MB on all ranks"):
        assert () == by_counter(function, P("x"), P("x"), "2").plan(q).comms
