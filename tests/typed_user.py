"""A user's file with every public name; type checkers find no error in it, and no Any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import spmd
from spmd import P, checkpoint, debug, optim, random, rules
from spmd.api.jit import Jitted
from spmd.collectives import (
    all_gather,
    all_to_all,
    axis_environment,
    axis_index,
    axis_size,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    ragged_all_to_all,
    shard_offset,
)
from spmd.inspect import Plan

Params = dict[str, Tensor]

mesh = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
LAYOUT = {"w": P("data", "model"), "b": P("model")}


def loss(params: Params, x: Tensor) -> Tensor:
    return (x @ params["w"] + params["b"]).square().mean()


# Functions under jit keep their parameters and results.


@spmd.jit((LAYOUT, P("data")), P(), mesh=mesh)
def jitted_loss(params: Params, x: Tensor, *, scale: float = 1.0) -> Tensor:
    return scale * loss(params, x)


@spmd.jit  # type: ignore[misc]  # its options take Any: the keys of `rules` are torch's operators
def plain_decorator(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    return x + y, 2.0


@spmd.jit(mesh=mesh, donate_argnums=0, comms="allow", memory_limit="1GB")
def by_keywords(x: Tensor) -> Tensor:
    return x.sin()


class Model:
    def __init__(self) -> None:
        self.weight = torch.ones(4, 6)

    @spmd.jit(mesh=mesh)
    def step(self, x: Tensor, rate: float) -> Tensor:
        return rate * (x @ self.weight)


def functions(params: Params, x: Tensor) -> Tensor:
    assert_type(jitted_loss(params, x, scale=2.0), Tensor)
    with spmd.use_mesh(mesh):
        found, number = plain_decorator(x, y=x)
    assert_type(found, Tensor)
    assert_type(number, float)
    assert_type(Model().step(x, 0.5), Tensor)
    wrapped = spmd.jit(loss, (LAYOUT, P("data")), P(), mesh=mesh)
    assert_type(wrapped(params, x), Tensor)
    assert_type(spmd.jit(loss, in_shardings=(LAYOUT, P("data")), out_specs=spmd.FREE, mesh=mesh)(params, x), Tensor)
    assert_type(wrapped.plan(params, x), Plan)
    assert_type(wrapped.lower(params, x).as_text(), str)
    assert_type(wrapped.trace(params, spmd.TensorMeta((8, 4), torch.float32)).input_paths, tuple[str, ...])
    assert_type(wrapped.compile(params, x)(params, x), Tensor)
    assert_type(wrapped.cache_info().hits, int)
    wrapped.cache_clear()
    first: Jitted[[Tensor], Tensor] = by_keywords
    assert_type(first(x.clone()), Tensor)
    spmd.jit(nn.Linear(4, 6), mesh=mesh)
    result = wrapped(params, x)
    if isinstance(result, spmd.DTensor):
        assert_type(result.spec, spmd.DTensorSpec)
    return result


# Per-rank functions.


def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    assert_type(axis_index("data"), Tensor)
    assert_type(axis_size("data"), int)
    assert_type(shard_offset(8, "data"), Tensor)
    total = psum({"x": x.sum()}, "data")
    assert_type(total, dict[str, Tensor])
    assert_type(pmean(x, "data"), Tensor)
    assert_type(pmax(x, ("data", "model")), Tensor)
    assert_type(pmin(x, "data"), Tensor)
    gathered = all_gather(w, "model", axis=0, tiled=True)
    assert_type(psum_scatter(gathered, "model", tiled=True), Tensor)
    assert_type(all_to_all(gathered, "model", 0, 0, tiled=True), Tensor)
    assert_type(ppermute(x, "data", [(0, 1), (1, 0)]), Tensor)
    assert_type(pcast(torch.ones(2), "data", to="varying"), Tensor)
    debug.print("total {}", total["x"])
    return total["x"], psum(x @ gathered, "model") / axis_size("model")


@spmd.shard_map(mesh=mesh, in_specs=(P("data"), P("model")), out_specs=(P(), P("data")))
def decorated(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return body(x, w)


def ragged(x: Tensor, out: Tensor, sizes: Tensor) -> Tensor:
    return ragged_all_to_all(x, out, sizes, sizes, sizes, sizes, axis_name="data")


def host(x: Tensor) -> None:
    pass


def per_rank(x: Tensor, w: Tensor) -> None:
    mapped = spmd.shard_map(body, mesh, (P("data"), P("model")), (P(), P("data")))
    assert_type(mapped(x, w), tuple[Tensor, Tensor])
    assert_type(decorated(x, w)[1], Tensor)
    assert_type(mapped.plan(x, w), Plan)
    assert_type(mapped.lower(x, w).as_text(), str)
    with axis_environment({"data": 2}):
        pass
    debug.callback(host, x)


# Values.


def values(params: Params, x: Tensor, module: nn.Module) -> Params:
    placed = spmd.distribute(params, LAYOUT, mesh)
    assert_type(placed, dict[str, Tensor])
    one = spmd.distribute(x, P("data"), mesh)
    assert_type(one, spmd.DTensor)
    assert_type(one.full_tensor(), Tensor)
    assert_type(one.shards, tuple[Tensor, ...])
    assert_type(one.redistribute(P()), spmd.DTensor)
    assert_type(spmd.DTensor.from_local([x] * 4, mesh, P()).mesh, spmd.Mesh)
    assert_type(one.spec.pspec, P)
    assert_type(one.placements[0], spmd.Shard | spmd.Replicate | spmd.Partial)
    assert_type(one[0], Tensor)
    assert_type(spmd.full_tree({"x": one}), dict[str, Tensor])
    assert_type(spmd.full_tree(one), Tensor)
    assert_type(spmd.full_tree((placed, len(params))), tuple[dict[str, Tensor], int])
    assert_type(spmd.from_process_data(x, P("data"), mesh), spmd.DTensor)
    assert_type(spmd.from_process_data(params, LAYOUT, mesh), dict[str, Tensor])
    assert_type(spmd.distribute_module(module, mesh), nn.Module)
    assert_type(spmd.materialize(nn.Linear(2, 2, device="meta"), {"weight": P("data")}, mesh), nn.Module)
    made: list[spmd.DTensor] = [
        spmd.zeros(4, 3, spec=P("data"), mesh=mesh),
        spmd.ones((4, 3), mesh=mesh),
        spmd.empty(4, mesh=mesh),
        spmd.full((4,), 2.0, mesh=mesh),
        spmd.rand(4, mesh=mesh),
        spmd.randn(4, mesh=mesh),
        spmd.arange(8, spec=(spmd.Shard(0), spmd.Replicate()), mesh=mesh),
        spmd.zeros_like(one),
        spmd.ones_like(x, mesh=mesh),
        spmd.empty_like(x, mesh=mesh),
        spmd.full_like(x, 3, mesh=mesh),
        spmd.rand_like(one),
        spmd.randn_like(one),
    ]
    assert_type(spmd.constrain(made[0], P()), spmd.DTensor)
    assert_type(spmd.reshard(made[0], P("data")), spmd.DTensor)
    assert_type(spmd.visualize(one).svg, str)
    with spmd.implicit_replication():
        assert_type(one + x, Tensor)
    with spmd.comms_of() as sent:
        one.full_tensor()
    assert_type(sent.bytes, float)
    return placed


def torchs(x: spmd.DTensor) -> spmd.DTensor:
    return spmd.from_torch_dtensor(spmd.to_torch_dtensor(x))


def layouts(model: nn.Module, params: Params) -> None:
    assert_type(spmd.specs(model, {"*.weight": P("model")}), dict[str, P])
    assert_type(spmd.specs(params, {"w": P("model")}), dict[str, P])
    assert_type(spmd.specs([params], {"*.w": P("model")}), object)
    assert_type(spmd.fsdp_specs(model, "data", mesh=mesh), dict[str, P])
    assert_type(spmd.tensor_parallel_specs(model, "model", (torch.ones(2, 4),), mesh=mesh), dict[str, P])
    meta = spmd.TensorMeta((8, 4), torch.float32)
    spec = spmd.DTensorSpec(mesh, (("data",), ()), (("model", "sum"),), meta)
    assert_type(spec.local_shape((0, 0)), tuple[int, ...])
    assert_type(spmd.PartitionSpec("data"), P)
    print(spmd.Partial("max").op, P("data", partial={"model": "sum"}))


# The host.


def cube(x: Tensor) -> Tensor:
    return x**3


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def from_host(x: Tensor) -> None:
    meta = spmd.TensorMeta((4,), torch.float32)
    assert_type(spmd.pure_callback(cube, meta, x), Tensor)
    assert_type(spmd.pure_callback(both, (meta, meta), x), tuple[Tensor, Tensor])
    with spmd.disable_jit(), spmd.log_compiles():
        pass


def add(x: int, y: int) -> int:
    return x + y


def processes() -> int:
    if not spmd.is_distributed():
        return spmd.launch(add, 2, 3, 4)
    spmd.init(timeout=60)
    return spmd.process_index() + spmd.process_count()


# Optimizers.


def optimizers(params: Params, grads: Params) -> Params:
    adam = optim.adamw(1e-3)
    state = adam.init(params)
    assert_type(state, optim.AdamWState)
    assert_type(state.step, Tensor)
    params, state = adam.step(params, state, grads)
    updates, state = adam.update(grads=grads, state=state, params=params)
    assert_type(updates, dict[str, Tensor])
    assert_type(optim.apply_updates(params, updates), dict[str, Tensor])
    momentum: optim.Optimizer[optim.SgdState] = optim.clip_by_global_norm(1.0, optim.sgd(0.1, 0.9))
    masters = optim.master_weights(momentum)
    copies = masters.init(params)
    assert_type(copies.inner, optim.SgdState)
    assert_type(masters.step(params, copies, grads), tuple[dict[str, Tensor], optim.MasterWeightsState[optim.SgdState]])
    assert_type(optim.global_norm(grads), Tensor)
    specs = optim.MasterWeightsState(LAYOUT, optim.AdamWState(P(), LAYOUT, LAYOUT))
    assert_type(specs.inner.mean, dict[str, P])
    return params


# Checkpoints.


def checkpoints(folder: Path, params: Params) -> Params:
    checkpoint.save({"params": params, "at": checkpoint.Position(3)}, folder, keep=2)
    assert_type(checkpoint.save_async(params, folder / "later"), checkpoint.Saving)
    assert_type(checkpoint.exists(folder), bool)
    assert_type(checkpoint.saved(folder), list[Path])
    assert_type(checkpoint.load(folder / "later", LAYOUT, mesh=mesh), dict[str, spmd.DTensor])
    loaded = checkpoint.load(folder, {"params": params})
    assert_type(loaded, dict[str, dict[str, Tensor]])
    return loaded["params"]


def files(folder: Path, params: Params) -> dict[str, spmd.DTensor]:
    spmd.save_safetensors(params, folder)
    return spmd.load_safetensors(folder, LAYOUT, mesh)


# Loops and branches.


def step(total: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return total + row[0].sum(), row[1]


def indexed(i: Tensor, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[1] * i, pair[0]


def count(total: Tensor, row: None) -> tuple[Tensor, None]:
    return total + 1, row


def is_small(x: Tensor) -> Tensor:
    return x.sum() < 100


def doubled(x: Tensor) -> Tensor:
    return x * 2 + 1


def scaled(x: Tensor, scale: float) -> Tensor:
    return x * scale


def squared(row: Tensor) -> tuple[Tensor, Tensor]:
    return row * row, row


def loops(x: Tensor) -> Tensor:
    assert_type(spmd.scan(step, x.sum(), (x, x)), tuple[Tensor, Tensor])
    assert_type(spmd.scan(step, 0.0, (x, x), reverse=True, unroll=2), tuple[Tensor, Tensor])
    assert_type(spmd.scan(count, 0, length=3)[0], Tensor)
    assert_type(spmd.fori_loop(0, 3, indexed, (x, x)), tuple[Tensor, Tensor])
    assert_type(spmd.while_loop(is_small, doubled, x), Tensor)
    assert_type(spmd.while_loop(is_small, doubled, 0), Tensor)
    assert_type(spmd.cond(x.sum() > 0, scaled, scaled, x, 2.0), Tensor)
    assert_type(spmd.switch(1, [doubled, doubled], x), Tensor)
    assert_type(spmd.map(squared, x, batch_size=2), tuple[Tensor, Tensor])
    assert_type(spmd.stack_layers([{"weight": x}, {"weight": x}]), dict[str, Tensor])
    return spmd.associative_scan(added, x)


def added(x: Tensor, y: Tensor) -> Tensor:
    return x + y


# Random numbers by keys.


def draws(seed: int, x: Tensor) -> Tensor:
    key: random.Key = random.key(seed, impl="threefry2x32")
    keys = random.split(random.wrap_key_data(random.key_data(key)), 3)
    assert_type(keys.reshape(keys.size, 1), random.Key)
    assert_type((keys, random.PRNGKey(0)), tuple[random.Key, random.Key])
    assert_type(random.key_impl(keys), str)
    assert_type([random.fold_in(key, 1) for key in keys], list[random.Key])
    assert_type(random.to_generator(random.from_generator()), torch.Generator)
    with random.check_keys():
        assert_type(random.bits(keys[0], (2,), torch.uint8), Tensor)
    floats = random.uniform(key, (2,), minval=x[0, 0]) + random.normal(key, (2,), torch.float64)
    floats = floats + random.gumbel(key, (2,)) + random.exponential(key) + random.truncated_normal(key, -1.0, 1.0)
    items = random.choice(key, x, (2,)), random.permutation(key, 5), random.categorical(key, x)
    assert_type(items, tuple[Tensor, Tensor, Tensor])
    print(random.bernoulli(key, 0.5, (2,)), random.randint(key, (2,), 0, 9), floats)
    return spmd.jit(random.dropout, mesh=mesh)(key, x, 0.1)


# Plans and rules.


def plans(params: Params, x: Tensor, path: Path) -> str:
    machine = spmd.Machine(flops=1e12)
    plan = spmd.jit(loss, (LAYOUT, P("data")), P(), mesh=mesh, machine=machine).plan(params, x)
    assert_type(plan.seconds, float)
    for comm in plan.comms:
        assert_type(comm.bytes, float)
        assert_type(comm.axes, tuple[str, ...])
    plan.save(path)
    assert_type(spmd.jit(loss, (LAYOUT, P("data")), P(), mesh=mesh, plan=path).plan(params, x), Plan)
    return str(plan.explain("mm"))


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x[:, None] * y


def rule(call: rules.Call) -> rules.Factors:
    return rules.Factors(((("i",),),), ((("i",),),), {"i": 4})


def own_rules(x: Tensor) -> Tensor:
    row = rules.Row((spmd.Shard(0),), (spmd.Shard(0),))
    made: Sequence[rules.Rule] = [
        rules.Rule(rule),
        rules.factors("i j, j k -> i k", sum="j"),
        rules.along(dims="dim"),
        rules.batched("1", "1"),
        rules.pointwise(
            rules.carry("x"), rules.increasing("y"), rules.decreasing("z"), rules.ignores("w"), rules.linear("v")
        ),
        rules.reduction("sum"),
    ]
    found: rules.Rule | None = rules.find_rule(torch.ops.aten.sin.default)  # type: ignore[misc]  # torch's operators
    call = rules.Call(torch.ops.aten.sin.default, (x,), {}, ())  # type: ignore[misc]  # are typed by Any
    strategy: rules.Strategy = rules.derive_strategies(rule(call))[0]
    body: rules.Body | None = strategy.body or row.body
    print(len(made), found, body)
    operator: rules.CustomOperator[Tensor] = rules.custom_operator(
        torch.library.custom_op("typed::outer", outer, mutates_args=()),
        "i, j -> i j",
    )
    assert_type(operator(x, x), Tensor)
    return spmd.jit(outer, mesh=mesh, rules={**rules.RULES, **operator.rules})(x, x)  # type: ignore[misc]


def mistakes(call: Jitted[[], Tensor]) -> Tensor | None:
    try:
        return call()
    except (spmd.MeshError, spmd.ShardingError, spmd.RuleError, spmd.TraceError, spmd.PlanError) as error:
        print(error)
    except (spmd.DivergenceError, spmd.CheckpointError) as error:
        print(error)
    except spmd.SpmdError:
        raise
    return None
