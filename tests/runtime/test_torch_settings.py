"""What torch's state around a call decides: it chooses the program, and does not touch a program that runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import spmd
from spmd import P
from spmd.core.static_key import static_key
from spmd.runtime.torch_settings import torch_settings

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class CosForSin(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))


COS_FOR_SIN = CosForSin()
STATES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast in autocast": lambda: torch.autocast("cpu", enabled=False),
    "default dtype": lambda: default_dtype(torch.float64),
    "deterministic": deterministic,
    "attention kernels": lambda: sdpa_kernel(SDPBackend.MATH),
    "default device": lambda: torch.device("cpu"),
    "function mode": lambda: COS_FOR_SIN,
    "inference": torch.inference_mode,
    "grad": torch.enable_grad,
    "no grad": torch.no_grad,
}


def several(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Something that each state changes."""
    with torch.autocast("cpu", enabled=False):
        exact = x @ w
    counts = torch.arange(4) / 2
    gradient = torch.func.grad(lambda w: (x @ w).float().sum())(w)
    attention = torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
    return x @ w, exact, counts, torch.ones(4), torch.sin(x), gradient, attention


@pytest.mark.parametrize("second", STATES)
@pytest.mark.parametrize("first", ["none", "autocast", "function mode"])
def test_each_call_does_what_torch_does_around_it(first: str, second: str) -> None:
    jitted = spmd.jit(several, (P("data"), P()), P(), mesh=MESH)
    x, w = torch.randn(4, 3), torch.randn(3, 3)
    contexts = {"none": contextlib.nullcontext} | STATES
    for name in (first, second, first, "none"):
        with contexts[name]():
            expected = several(x, w)
            actual = jitted(x, w)
        for result, truth in zip(actual, expected, strict=True):
            assert (name, result.dtype, result.shards[0].dtype) == (name, truth.dtype, truth.dtype)
            torch.testing.assert_close(result.full_tensor(), truth.clone())


def test_one_program_for_one_state() -> None:
    traces = []

    def f(x: torch.Tensor) -> torch.Tensor:
        traces.append(1)
        return x + 1

    jitted = spmd.jit(f, P("data"), P("data"), mesh=MESH)
    for _ in range(2):
        jitted(torch.ones(4))
        with torch.autocast("cpu"):
            jitted(torch.ones(4))
        with torch.no_grad(), torch.inference_mode():
            jitted(torch.ones(4))
        with torch.device("cpu"):
            jitted(torch.ones(4))
    assert len(traces) == 3


def test_kernels_read_the_precision_of_products_when_they_run() -> None:
    read = []

    @torch.library.custom_op("spmd_test_ambient::precision", mutates_args=())
    def precision(x: torch.Tensor) -> torch.Tensor:
        read.append(torch.get_float32_matmul_precision())
        return x.clone()

    precision.register_fake(torch.empty_like)
    jitted = spmd.jit(lambda x: precision(x), P(), P(), mesh=spmd.make_mesh({"data": 1}, runtime="virtual"))
    jitted(torch.ones(2))
    torch.set_float32_matmul_precision("high")
    try:
        jitted(torch.ones(2))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert read == ["highest", "high"]


def test_a_compiled_function_is_for_the_state_that_it_was_compiled_in() -> None:
    compiled = spmd.jit(lambda x: x @ x, P(), P(), mesh=MESH).compile(torch.ones(2, 2))
    with (
        torch.autocast("cpu"),
        pytest.raises(spmd.TraceError, match="compiled under other settings of torch: autocast"),
    ):
        compiled(torch.ones(2, 2))
    assert compiled(torch.ones(2, 2)).dtype == torch.float32


def test_programs_run_outside_of_the_modes_around_them() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    jitted = spmd.jit(lambda x: x.sin().cos(), P("data"), P("data"), mesh=MESH)
    x = spmd.distribute(torch.ones(4), P("data"), MESH)
    with Watch():
        jitted(x)
        seen.clear()
        jitted(x)
    assert not [func for func in seen if isinstance(func, torch._ops.OpOverload)]


def test_the_trace_is_not_seen_by_dispatch_modes() -> None:
    jitted = spmd.jit(lambda x, w: x @ w, (P("data"), P()), P("data"), mesh=MESH)
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            jitted(torch.ones(4, 3), torch.ones(3, 5))
        counts.append(counter.get_total_flops())
    assert counts == [120, 120]


def test_the_state_of_a_plain_process_is_cheap_to_compare() -> None:
    assert torch_settings() == torch_settings()
    assert all(not isinstance(item, tuple) for item in torch_settings())
    with torch.autocast("cpu"):
        assert torch_settings() == torch_settings()
        inside = torch_settings()
    assert inside != torch_settings()


@attrs.frozen
class Config:
    scale: Any


@pytest.mark.parametrize(
    ("values", "programs"),
    [
        ([(2,), (2.0,), (True,), (2,)], 3),
        ([0.0, -0.0, 0.0], 2),
        ([(0.0,), (-0.0,)], 2),
        ([complex(0.0, 0.0), complex(0.0, -0.0)], 2),
        ([math.nan, float("nan"), (math.nan,), (float("nan"),)], 2),
        ([Config(2), Config(2.0), Config(True), Config(2), Config(math.nan), Config(float("nan"))], 4),
        ([frozenset({1}), frozenset({1.0}), frozenset({True})], 3),
        (["a", b"a", None, "a"], 3),
    ],
)
def test_static_arguments_share_a_program_only_where_it_cannot_tell_them_apart(
    values: list[Any], programs: int
) -> None:
    traces = []

    def f(x: torch.Tensor, option: Any) -> torch.Tensor:
        traces.append(option)
        return x + 1

    jitted = spmd.jit(f, P(), P(), mesh=MESH, static_argnums=1)
    for value in values * 2:
        jitted(torch.ones(2), value)
    assert len(traces) == programs


def test_static_arguments_that_compare_as_they_like() -> None:
    @attrs.define(eq=False)
    class ById:
        number: int

    @attrs.frozen(hash=False)
    class WithList:
        numbers: list[int]

        def __hash__(self) -> int:
            return 1

    assert static_key(ById(1)) != static_key(ById(1))
    assert static_key(WithList([1])) == static_key(WithList([1]))


def test_constants_are_what_they_are_when_called() -> None:
    table = torch.arange(6.0).reshape(2, 3)
    jitted = spmd.jit(lambda x: (x + table, table, table.T, table[:1]), P(), P(), mesh=MESH)
    for _ in range(2):
        expected = [table + 1, table.clone(), table.T.clone(), table[:1].clone()]
        results = jitted(torch.ones(2, 3))
        for result, truth in zip(results, expected, strict=True):
            assert torch.equal(result.full_tensor(), truth)
        table.zero_()
        for result in results:
            for shard in result.shards:
                shard.fill_(7)


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_results_that_are_constants_are_memory_of_their_own(spec: P) -> None:
    table = torch.arange(4.0)
    jitted = spmd.jit(lambda: (table, table.reshape(2, 2)), (), spec, mesh=MESH)
    for _ in range(2):
        for result in jitted():
            for shard in result.shards:
                shard.fill_(7)
    assert torch.equal(table, torch.arange(4.0))
    assert torch.equal(jitted()[0].full_tensor(), table)


@pytest.mark.parametrize("make", [lambda t: t.T, lambda t: t.expand(2, 2, 3), lambda t: t[:, ::2], lambda t: t[:0]])
def test_copies_of_constants_keep_their_strides(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    constant = make(torch.arange(6.0).reshape(1, 2, 3)[0])
    traced = spmd.jit(lambda: constant + 1, (), P(), mesh=MESH).trace()
    ((_, copied),) = traced.graph.constants
    assert (copied.stride(), copied.tolist()) == (constant.stride(), constant.tolist())
    assert copied.untyped_storage().data_ptr() != constant.untyped_storage().data_ptr() or constant.numel() == 0
