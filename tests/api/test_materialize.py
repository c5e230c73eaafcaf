"""Modules on the meta device, initialized on meshes: equal on each, and as on one device."""

from __future__ import annotations

import pytest
import torch
from initialized_modules import (
    MODELS,
    Initialized,
    Truncated,
    assert_equal,
    errors_on_processes,
    layers,
    materialized,
    memory,
    on_meta,
    state,
    states_by_both,
)
from sampling import product, sample
from torch import nn
from workers import call_on_mesh

import spmd
from spmd import P
from spmd.errors import MeshError, ShardingError, TraceError

MESHES = {
    name: spmd.make_mesh(axes, runtime="virtual")
    for name, axes in {"1": {"x": 1}, "2": {"x": 2}, "3": {"x": 3}, "4": {"x": 4}, "2x2": {"x": 2, "y": 2}}.items()
}
SPECS = {"replicated": P(), "rows": P("x"), "columns": P(None, "x"), "both": P("y", "x"), "joined": P(("y", "x"))}
CASES = [(mesh, spec) for mesh in MESHES for spec in SPECS if mesh == "2x2" or spec not in ("both", "joined")]


class Bare(nn.Module):
    """A parameter and a buffer that nothing but a function writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(3, 2))
        self.register_buffer("b", torch.empty(2))


def linear():
    return on_meta(lambda: nn.Linear(4, 6))


@pytest.mark.parametrize(("case", "model"), product(CASES, MODELS))
def test_numbers_are_equal_on_every_mesh(case, model):
    expected = materialized(MODELS[model], P(), MESHES["1"])
    module = materialized(MODELS[model], SPECS[case[1]], MESHES[case[0]])
    assert_equal(state(expected), state(module))
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        assert P(*SPECS[case[1]].dims[: x.ndim]) == x.spec.pspec and x.is_leaf
        assert isinstance(x, nn.Parameter) == (name in dict(module.named_parameters()))
        assert all(shard.untyped_storage().nbytes() == shard.nbytes for shard in x.shards)


@pytest.mark.parametrize(("case", "model"), product(CASES, ["initialized", "layers"]))
def test_numbers_of_torch_are_those_of_the_constructor(case, model):
    torch.manual_seed(3)
    expected, state_after = MODELS[model](), torch.get_rng_state()
    module = materialized(MODELS[model], SPECS[case[1]], MESHES[case[0]], rng="torch")
    assert_equal(state(expected), state(module))
    assert torch.equal(state_after, torch.get_rng_state())
    for name, x in expected.named_parameters():
        assert x.requires_grad == module.get_parameter(name).requires_grad


def test_numbers_by_keys_have_the_distributions_of_torch():
    class Large(Truncated):
        def write_last(self):
            super().write_last()
            self.big, self.wide = (nn.Parameter(torch.empty(100, 300)) for _ in range(2))
            nn.init.trunc_normal_(self.big, 0.5, 2.0, -1.0, 1.5)
            nn.init.orthogonal_(self.wide)

    module = materialized(Large, P("x"), MESHES["2"])
    values, expected = state(module), state(Large())
    assert -1 <= values["big"].min() < -0.99 and 1.49 < values["big"].max() <= 1.5
    for name in ("big", "wide"):
        assert values[name].std().item() == pytest.approx(expected[name].std().item(), rel=0.02)
        assert values[name].mean().item() == pytest.approx(expected[name].mean().item(), abs=0.02)
    torch.testing.assert_close(values["wide"] @ values["wide"].T, torch.eye(100), rtol=0, atol=1e-5)
    torch.testing.assert_close(values["inv_freq"], expected["inv_freq"])


def test_ties_and_buffers_stay_what_they_are():
    module = materialized(Initialized, P("x"), MESHES["2"])
    assert module.tied is module.weight
    assert "inv_freq" not in module.state_dict() and "table" in module.state_dict()
    tied = materialized(layers, P("x"), MESHES["2"])
    assert tied[-1].weight is tied[0].weight and 0 == tied[0].weight.full_tensor()[1].abs().max()


def test_a_call_draws_other_numbers_than_the_one_before():
    first, second = (spmd.materialize(linear(), {}, MESHES["2"]).weight.full_tensor() for _ in range(2))
    assert not torch.equal(first, second)


def test_layers_that_are_alike_draw_different_numbers():
    module = spmd.materialize(on_meta(lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))), {}, MESHES["2"])
    weights = [layer.weight.full_tensor() for layer in module]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


@pytest.mark.parametrize("rng", ["torch", "counter"])
def test_a_constructor_as_the_initializer(rng):
    """It copies the first layer, where `reset_parameters` of each would draw."""

    def encoder():
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 7), 2, enable_nested_tensor=False)

    made = [materialized(encoder, P("x"), MESHES[name], init=lambda _: encoder(), rng=rng) for name in ("1", "3", "2")]
    assert_equal(state(made[0]), state(made[1]))
    assert_equal(state(made[0]), state(made[2]))
    torch.manual_seed(3)
    if rng == "torch":
        assert_equal(state(encoder()), state(made[1]))
    assert type(made[1]) is nn.TransformerEncoder and P("x") == made[1].layers[1].linear1.weight.spec.pspec


def fill(module):
    nn.init.normal_(module.w, std=0.1)
    module.b.copy_(torch.arange(2.0))


def replace(module):
    module.w = nn.Parameter(torch.randn(3, 2) * 0.1)
    module.b = torch.arange(2.0)


@pytest.mark.parametrize("init", [fill, replace])
def test_a_function_as_the_initializer(init):
    torch.manual_seed(3)
    expected = Bare()
    init(expected) if init is replace else torch.no_grad()(init)(expected)
    module = materialized(Bare, P("x"), MESHES["3"], init=init, rng="torch")
    assert_equal(state(expected), state(module))
    assert isinstance(module.w, nn.Parameter) and not isinstance(module.b, nn.Parameter)


def test_values_that_are_there_are_kept_unless_an_initializer_writes_to_them():
    module = nn.Sequential(nn.Linear(4, 6), Bare())
    with torch.no_grad():
        module[1].w.fill_(7)
        module[1].b.fill_(5)
    module[1].b.requires_grad_(False)
    given = state(module)
    spmd.materialize(module, {"1.w": P("x"), "0.weight": P("x")}, MESHES["2"])
    found = state(module)
    assert_equal({name: given[name] for name in ("1.w", "1.b")}, {name: found[name] for name in ("1.w", "1.b")})
    assert not torch.equal(given["0.weight"], found["0.weight"]) and P("x") == module[1].w.spec.pspec


def test_an_optimizer_and_a_step_afterwards():
    def losses(mesh):
        torch.manual_seed(0)
        model = on_meta(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
        spmd.materialize(model, spmd.fsdp_specs(model, "x"), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = spmd.distribute(torch.ones(4, 4), P("x"), mesh)
        for _ in range(3):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    expected = list(losses(MESHES["1"]))
    assert expected[-1] < expected[0]
    assert list(losses(MESHES["4"])) == pytest.approx(expected, rel=1e-5)


def test_a_function_in_jit_draws_what_a_module_draws():
    """Each rank draws its shard, of a program as for `materialize`."""

    def init():
        module = nn.Linear(6, 8)
        return module.weight, module.bias

    made = []
    for name in ("1", "2", "4"):
        jitted = spmd.jit(init, (), (P("x"), P("x")), mesh=MESHES[name], rng="counter")
        assert () == jitted.plan().comms
        torch.manual_seed(1)
        made.append([x.full_tensor() for x in jitted()])
    assert all(map(torch.equal, made[0], made[1])) and all(map(torch.equal, made[0], made[2]))


def write_part(module):
    nn.init.zeros_(module.b)
    module.w[:2].normal_()


def read_values(module):
    fill(module)
    if module.w.sum() > 0:
        module.w.neg_()


def read_number(module):
    fill(module)
    module.w.div_(module.w.norm().item())


def scale(module):
    module.b.zero_()
    module.w.mul_(2)


def seed(module):
    torch.manual_seed(1)
    fill(module)


def generator(module):
    module.b.zero_()
    module.w.normal_(generator=torch.Generator().manual_seed(1))


def placed():
    module = nn.Linear(4, 6)
    module.weight = nn.Parameter(spmd.distribute(torch.ones(6, 4), P("x"), MESHES["2"]))
    return module


def reshape(module):
    module.weight.data = torch.ones(3)


def extend(module):
    module.reset_parameters()
    module.extra = nn.Parameter(torch.zeros(2))


def truncate(module):
    nn.init.zeros_(module.bias)
    nn.init.trunc_normal_(module.weight)


NO_INIT = r"No initializer of Bare writes to:\n  w f32\[3,2\] of Bare"
INIT_ERRORS = {
    "nothing": (Bare, None, ShardingError, NO_INIT + r"\n  b f32\[2\] of Bare\n.*init=lambda _: Model"),
    "a part": (Bare, write_part, ShardingError, NO_INIT + ", 2 of 6 elements"),
    "scaled memory": (Bare, scale, ShardingError, NO_INIT + "\n"),
    "values": (Bare, read_values, TraceError, r"`if`.* at test_materialize.py:\d+ .*needs the values"),
    "a number": (Bare, read_number, TraceError, r"\.item\(\) at test_materialize.py:\d+ "),
    "seed": (Bare, seed, TraceError, "changes torch's random generator at test_materialize.py"),
    "generator": (Bare, generator, TraceError, r"draws from a torch.Generator of its own"),
    "shape of data": (nn.Linear, reshape, TraceError, r"x.data = ... at .* makes f32\[6,4\] a tensor f32\[3\]"),
    "more tensors": (nn.Linear, extend, ShardingError, "What initializes Linear has extra, unlike the module"),
    "fewer": (nn.Linear, lambda _: nn.Linear(4, 6, bias=False), ShardingError, "initializes Linear lacks bias"),
    "no function": (nn.Linear, "xavier", ShardingError, "init must be a function of the module .got str 'xavier'"),
}


@pytest.mark.parametrize("name", INIT_ERRORS)
def test_what_initializers_cannot_do(name):
    kind, init, error, text = INIT_ERRORS[name]
    module = on_meta(kind if kind is Bare else lambda: nn.Linear(4, 6))
    before = dict(module.named_parameters())
    with pytest.raises(error, match=text):
        spmd.materialize(module, {}, MESHES["2"], init=init)
    after = dict(module.named_parameters())
    assert before.keys() == after.keys() and all(before[n] is after[n] for n in before)


def twice():
    module = spmd.materialize(linear(), {}, MESHES["2"])
    spmd.materialize(module, {}, MESHES["2"])


def call(module, specs=None, mesh=MESHES["2"], **options):
    return lambda: spmd.materialize(module(), specs, mesh, **options)


def in_jit():
    spmd.jit(lambda x: spmd.materialize(linear()).weight * x, mesh=MESHES["2"])(torch.ones(4))


CALLS = {
    "no module": (call(dict), ShardingError, r"takes an nn.Module .*\(got dict\)"),
    "rng": (call(linear, rng="numpy"), ShardingError, "rng must be 'counter' or 'torch' .got 'numpy'"),
    "dims": (call(linear, {"bias": P(None, "x")}), ShardingError, r"bias f32\[6\]: .*names 2 dims"),
    "axis": (call(linear, {"bias": P("q")}), ShardingError, "Unknown mesh axis 'q'"),
    "name": (call(linear, {"b": P("x")}), ShardingError, "a spec for 'b', which Linear lacks"),
    "twice": (twice, ShardingError, "was distributed before"),
    "DTensors": (call(placed), ShardingError, "weight of Linear is a DTensor already"),
    "abstract": (call(linear, None, spmd.make_mesh({"x": 2}, runtime="abstract")), MeshError, "holds no data"),
    "no mesh": (call(linear, None, None), MeshError, "No mesh was given"),
    "lazy": (call(lambda: nn.LazyLinear(3)), ShardingError, "weight has no shape yet"),
    "traced": (in_jit, TraceError, r"materialize at test_materialize.py:\d+ .*stands in a function that is traced"),
    "truncated by torch": (
        call(linear, init=truncate, rng="torch"),
        TraceError,
        r'trunc_normal_ at test_materialize.py:\d+ .*rng="counter"',
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name):
    function, error, text = CALLS[name]
    with pytest.raises(error, match=text):
        function()


@pytest.mark.parametrize("spec", sample([P("y", "x"), P(("x", "y"))], [P("y", "x")]))
def test_processes(workers, spec):
    expected = states_by_both(P(), MESHES["1"])
    for found in workers.run(call_on_mesh, states_by_both, {"x": 2, "y": 2}, "distributed", spec, ranks=4):
        for theirs, ours in zip(expected, found, strict=True):
            assert_equal(theirs, ours)


@pytest.mark.slow
@pytest.mark.parametrize("rng", ["torch", "counter"])
def test_a_rank_holds_its_shards_and_one_parameter(workers, rng):
    for peak, expected in workers.run(memory, rng, ranks=4):
        assert peak <= 1.15 * expected


def test_errors_on_processes(workers):
    found = workers.run(call_on_mesh, errors_on_processes, {"x": 4}, "distributed", ranks=4)
    for rank, texts in enumerate(found):
        assert "DivergenceError" in texts["seeds"] and "torch.manual_seed" in texts["seeds"]
        assert "DivergenceError" in texts["shapes"] and "weight" in texts["shapes"]
        assert ("on rank 1" if rank == 1 else "Rank 1 failed in materialize of Linear") in texts["failure"]


def test_copied_layers_are_parameters():
    make = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)  # noqa: E731
    with torch.device("meta"):
        model = make()
    spmd.materialize(model, {}, MESHES["2"], init=lambda _: make())
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
