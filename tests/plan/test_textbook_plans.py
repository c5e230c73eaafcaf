"""Plans of training steps against the textbook's: bytes of the six strategies, and schedules to the letter."""

import functools
from collections import Counter

import pytest
from sampling import product, sample

import gpt
import layouts
import planner
import schedules
from schedules import RANKS, SCHEDULES, config
from spmd.inspect import Plan
from textbook import PEERS, WORKLOAD, scatter, textbook
from workloads import GptStep

ROUNDING = 0.005e6
"""Peers' megabytes are known to two digits after the point."""


@functools.lru_cache
def workload_plan(strategy: str) -> Plan:
    return GptStep(WORKLOAD, strategy, batch=16).plan()


each_strategy = pytest.mark.parametrize("strategy", sample(layouts.STRATEGIES, ["fsdp_tp", "sp"]))
"""The others are these without an axis."""


@each_strategy
def test_the_workload_sends_no_more_than_the_textbook_and_jax(strategy: str) -> None:
    sent = sum(comm.bytes for comm in workload_plan(strategy).comms)
    assert 0 < sent <= textbook(strategy)
    assert sent <= PEERS[strategy].jax_gpu * 1e6 + ROUNDING


@each_strategy
def test_every_collective_of_the_workload_has_a_cause_and_a_line(strategy: str) -> None:
    for comm in workload_plan(strategy).comms:
        assert "requires" in comm.cause or "over a sharded dim" in comm.cause
        assert comm.source is not None
        assert comm.source.line > 0
        assert comm.source.file.endswith(("gpt.py", "training.py", "layouts.py")), comm


@pytest.mark.parametrize(("name", "layers"), product(["dp", "fsdp", "zero1", "tp"], [1, 2]))
def test_textbook_schedules_are_found_where_they_are_the_cheapest(name: str, layers: int) -> None:
    schedule = SCHEDULES[name]
    assert schedule.sent(layers) == schedule.found(schedule.step(layers).plan())


@pytest.mark.parametrize(("name", "layers"), product(["dp, pinned", "fsdp, pinned", "zero1, pinned"], [1, 2]))
def test_data_parallel_schedules_are_had_by_asking(name: str, layers: int) -> None:
    schedule = SCHEDULES[name]
    assert schedule.sent(layers) == schedule.found(schedule.step(layers).plan())


@pytest.mark.parametrize("layers", [1, 2])
def test_megatron_is_had_by_asking(layers: int) -> None:
    schedule = SCHEDULES["tp, pinned"]
    plan = schedule.step(layers).plan(keep_sharded={"0.params": "model"})
    assert schedule.sent(layers) == schedule.found(plan)


def test_megatron_is_no_cheaper_than_what_is_found_without_pins() -> None:
    schedule = SCHEDULES["tp, pinned"]
    pinned = schedule.step(1).plan(keep_sharded={"0.params": "model"})
    assert GptStep(config(1, vocab=32_768), "tp", batch=4).plan().seconds <= pinned.seconds


def test_parameters_are_gathered_twice_under_a_memory_limit() -> None:
    step = SCHEDULES["fsdp"].step(2)
    free = step.plan()
    limit = int(0.75 * free.memory.peak)
    plan = step.plan(memory_limit=limit)
    assert plan.memory.peak <= limit
    found, once = SCHEDULES["fsdp"].found(plan), SCHEDULES["fsdp"].sent(2)
    assert {key: count for key, count in found.items() if key[0] != "all_gather"} == {
        key: count for key, count in once.items() if key[0] != "all_gather"
    }
    weights = {
        ("all_gather", scatter(RANKS) * size * schedules.WIDTH**2 * 4): count for size, count in ((1, 8), (4, 4))
    }
    gathers = Counter({key: found[key] for key in weights})
    assert all(weights[key] <= gathers[key] <= 2 * weights[key] for key in weights)
    assert gathers[max(weights)] > weights[max(weights)]


def test_the_step_is_that_of_the_example() -> None:
    """What is planned here is what `examples/training.py` runs."""
    step = GptStep(gpt.Config(layers=1), "tp", batch=16)
    assert str(step.plan()) == str(step.training().step().plan(*step.arguments()))


@pytest.mark.slow
def test_plans_of_the_workload_do_not_depend_on_hash_seeds() -> None:
    found = [planner.plans_by_seed(seed, 1, ("fsdp_tp", "sp")) for seed in range(3)]
    assert found[0].keys() == {"fsdp_tp", "sp"}
    assert found[0] == found[1] == found[2]
