"""Threads that call jitted functions, transforms and operators at once: numbers, generators and flags of one thread."""

import asyncio
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import P
from spmd.api.eager import operator_cache
from spmd.core.compile_lock import COMPILING
from spmd.tracing.torch_state import TorchState

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")
THREADS = 8
X = torch.arange(24.0).reshape(6, 4) / 10
LSTM = torch.nn.LSTM(4, 3)


def mixed(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.T).softmax(-1).sum(0)


def gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda y: (mixed(y) * y.sum(1)).sum())(x)


def recurrent(x: torch.Tensor) -> torch.Tensor:
    return LSTM(x[:, None])[0]


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    inner = lambda y: torch.utils.checkpoint.checkpoint(mixed, y, use_reentrant=False)  # noqa: E731
    return torch.func.grad(lambda y: inner(y).square().sum())(x)


FUNCTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [mixed, gradient, recurrent, checkpointed]


def jitted() -> list[Any]:
    """New jitted functions: their first calls compile."""
    return [spmd.jit(function, P("data"), P(), mesh=MESH) for function in FUNCTIONS]


def transformed(function: Any) -> torch.Tensor:
    return torch.func.grad(lambda y: function(y).sum())(spmd.distribute(X, P("data"), MESH)).full_tensor()


def eager(number: int) -> torch.Tensor:
    x = spmd.distribute(X, P("data"), MESH)
    return (x * number + x.sum(0)).cos().full_tensor()


def calls(functions: list[Any]) -> list[Callable[[], torch.Tensor]]:
    """What threads call, each with one result whenever it is called."""
    return [
        *((lambda f=f: f(X).full_tensor()) for f in functions),
        lambda: transformed(functions[0]),
        lambda: eager(3),
    ]


def expected() -> list[torch.Tensor]:
    x = X.clone()
    grad = torch.func.grad(lambda y: mixed(y).sum())(x)
    squares = torch.func.grad(lambda y: mixed(y).square().sum())(x)  # torch has no checkpoints under torch.func
    return [*(function(x) for function in FUNCTIONS[:3]), squares, grad, (x * 3 + x.sum(0)).cos()]


def run_at_once(work: list[Callable[[], Any]]) -> list[Any]:
    """The results of functions that threads of their own begin at once; the first error is raised."""
    barrier = threading.Barrier(len(work))

    def begin(function: Callable[[], Any]) -> Any:
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result() for future in [pool.submit(begin, function) for function in work]]


def check_round(functions: list[Any], generator: random.Random) -> None:
    """Let threads make the calls in random orders, and compare each result with that of one device."""
    known = expected()

    def make_calls(order: list[int]) -> list[tuple[int, torch.Tensor]]:
        every = calls(functions)
        return [(number, every[number]()) for number in order]

    orders = [generator.sample(range(len(known)), len(known)) for _ in range(THREADS)]
    for results in run_at_once([lambda order=order: make_calls(order) for order in orders]):
        for number, actual in results:
            torch.testing.assert_close(actual, known[number])


@pytest.fixture(autouse=True)
def unchanged():
    """Whatever threads do, the settings of torch stay, and so does the generator where nothing draws."""
    before, numbers = TorchState.now(), torch.get_rng_state()
    flags = torch.backends.mkldnn.enabled, torch.compiler.is_compiling(), torch.get_num_threads()
    yield
    assert () == before.changed()
    assert torch.equal(numbers, torch.get_rng_state())
    assert flags == (torch.backends.mkldnn.enabled, torch.compiler.is_compiling(), torch.get_num_threads())


@pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_first_calls(rounds):
    generator = random.Random(0)
    for _ in range(rounds):
        operator_cache._calls.clear()
        operator_cache.program_of.cache_clear()
        check_round(jitted(), generator)


@pytest.mark.parametrize("rounds", [5, pytest.param(1000, marks=pytest.mark.slow)])
def test_warm_calls(rounds):
    functions, generator = jitted(), random.Random(1)
    check_round(functions, generator)
    for _ in range(rounds):
        check_round(functions, generator)
    assert [1] * len(functions) == [function.cache_info().currsize for function in functions]


def test_functions_are_traced_once():
    traced = []

    def function(x: torch.Tensor) -> torch.Tensor:
        traced.append(1)
        return x + 1

    one = spmd.jit(function, P("data"), P(), mesh=MESH)
    run_at_once([lambda: one(X)] * THREADS)
    assert [1] == traced


def test_a_loader_draws_while_a_step_compiles():
    drawn: list[torch.Tensor] = []
    stops = threading.Event()

    def load() -> None:
        while not stops.is_set():
            drawn.append(torch.rand(3))

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + mixed(x).sum()

    numbers = torch.get_rng_state()
    loader = threading.Thread(target=load)
    loader.start()
    try:
        for _ in range(3):
            spmd.jit(step, P("data"), P(), mesh=MESH).plan(X)
    finally:
        stops.set()
        loader.join()
    torch.set_rng_state(numbers)
    assert torch.equal(torch.stack(drawn), torch.rand(len(drawn), 3))  # nothing was drawn twice, or left out
    torch.set_rng_state(numbers)


def test_draws_of_threads_sum_up():
    function = spmd.jit(lambda x: x + torch.rand(6, 4), P("data"), P(), mesh=MESH)
    function.compile(X)
    numbers = torch.get_rng_state()
    results = run_at_once([lambda: [function(X).full_tensor() - X for _ in range(10)]] * THREADS)
    after = torch.get_rng_state()
    torch.set_rng_state(numbers)
    known = torch.stack([torch.rand(6, 4) for _ in range(10 * THREADS)])
    assert torch.equal(after, torch.get_rng_state())
    drawn = torch.stack([result for every in results for result in every])
    order = lambda tensors: sorted(tensors.flatten(1).sum(1).tolist())  # noqa: E731
    torch.testing.assert_close(order(drawn), order(known), rtol=1e-4, atol=1e-4)
    torch.set_rng_state(numbers)


def test_flags_that_another_thread_sets_are_no_change_of_the_function():
    before = torch.backends.cudnn.deterministic

    def function(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: torch._C._set_cudnn_deterministic(not before))
        thread.start()
        thread.join()
        return x + 1

    try:
        spmd.jit(function, P("data"), P(), mesh=MESH)(X)
        assert torch._C._get_cudnn_deterministic() is not before
    finally:
        torch._C._set_cudnn_deterministic(before)


def test_other_threads_have_torchs_own_functions_while_one_traces():
    seen: list[Any] = []

    def elsewhere() -> None:
        x = X.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(mixed, x, use_reentrant=False).sum().backward()
        seen.extend([torch.compiler.is_compiling(), x.grad, torch.backends.mkldnn.enabled])

    def function(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return x

    spmd.jit(function, P("data"), P(), mesh=MESH)(X)
    compiling, found, onednn = seen
    assert not compiling and onednn
    torch.testing.assert_close(found, torch.func.grad(lambda y: mixed(y).sum())(X))


def test_asyncio_executors():
    functions, known = jitted(), expected()

    async def main() -> list[torch.Tensor]:
        return await asyncio.gather(*(asyncio.to_thread(call) for call in calls(functions) * 2))

    for actual, wanted in zip(asyncio.run(main()), known * 2, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_contexts_hold_for_their_thread():
    """As `torch.no_grad` and the context variables of Python do; `asyncio.to_thread` takes them along."""
    function, ran = spmd.jit(lambda x: ran.append(type(x)) or x, P("data"), P(), mesh=MESH), []
    function(X)
    with spmd.disable_jit():
        run_at_once([lambda: function(X)])
        assert 1 == len(ran)
        function(X)
    assert 2 == len(ran)
    unbound = spmd.jit(mixed, P("data"), P())
    with spmd.use_mesh(MESH), pytest.raises(spmd.MeshError):
        run_at_once([lambda: unbound(X)])


def test_donated_results_of_threads_are_their_own():
    step = spmd.jit(lambda x: x + 1, P("data"), P("data"), mesh=MESH, donate_argnums=0)

    def count(start: float) -> torch.Tensor:
        x = spmd.distribute(X + start, P("data"), MESH)
        for _ in range(50):
            x = step(x)
        return x.full_tensor() - X

    results = run_at_once([lambda n=n: count(100.0 * n) for n in range(THREADS)])
    for number, actual in enumerate(results):
        torch.testing.assert_close(actual, torch.full_like(X, 100.0 * number + 50), rtol=1e-4, atol=1e-2)


def test_a_call_waits_for_a_trace_that_holds_its_module():
    """While a thread traces, the module has tensors of the trace, which another call with it must not take."""
    tracing, called = threading.Event(), threading.Event()

    def step(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == "first":
            tracing.set()
            called.wait(0.5)
        return net(x)

    for gradients in (True, False):
        net = torch.nn.BatchNorm1d(4).eval()
        with torch.set_grad_enabled(gradients):
            expected = net(X)
        known, function = spmd.jit(step, mesh=MESH), spmd.jit(step, mesh=MESH)
        tracing.clear(), called.clear()

        def call(jitted: Any, grad: bool = gradients, net: torch.nn.Module = net) -> torch.Tensor:
            with torch.set_grad_enabled(grad):
                return jitted(net, X)

        call(known)
        first = threading.Thread(target=call, args=(function,), name="first")
        first.start()
        tracing.wait()
        for _ in range(3):
            torch.testing.assert_close(call(known).full_tensor(), expected)
        called.set()
        first.join()


def test_buffers_are_those_of_the_thread_s_own_module():
    def step(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net(x)

    function = spmd.jit(step, mesh=MESH)
    nets = [torch.nn.BatchNorm1d(4) for _ in range(THREADS)]
    run_at_once([lambda n=n, net=net: [function(net, X * n) for _ in range(5)] for n, net in enumerate(nets)])
    for number, net in enumerate(nets):
        alone = torch.nn.BatchNorm1d(4)
        for _ in range(5):
            alone(X * number)
        torch.testing.assert_close(net.running_mean, alone.running_mean)
        assert net.num_batches_tracked == alone.num_batches_tracked


_FIRST_USE = """
import sys, threading
import torch
import spmd
mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
x, barrier, errors = torch.ones(4, 4), threading.Barrier(8), []
jit = lambda f: spmd.jit(f, spmd.P("data"), spmd.P(), mesh=mesh)
uses = [
    lambda: jit(lambda x: x.sin())(x), lambda: jit(lambda x: x @ x.T)(x).full_tensor(),
    lambda: spmd.distribute(x, spmd.P("data"), mesh) + 1, lambda: spmd.Machine, lambda: (spmd.checkpoint, spmd.rules),
    lambda: jit(torch.func.grad(lambda x: x.square().sum())).plan(x).timing, lambda: spmd.load_safetensors,
    lambda: spmd.shard_map(lambda x: x * 2, in_specs=spmd.P("data"), out_specs=spmd.P("data"), mesh=mesh)(x),
]
def use(number):
    barrier.wait()
    try:
        uses[number]()
    except BaseException as error:
        errors.append(repr(error))
threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit("; ".join(errors) or 0)
"""


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_first_uses_in_a_new_process(rounds):
    for _ in range(rounds):
        found = subprocess.run([sys.executable, "-c", _FIRST_USE], capture_output=True, text=True, check=False)
        assert (0, "") == (found.returncode, found.stderr)


def test_the_lock_is_free_after_errors():
    def function(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        spmd.jit(function, P("data"), P(), mesh=MESH)(X)
    assert run_at_once([lambda: COMPILING.acquire(timeout=5) and COMPILING.release() is None])[0]
