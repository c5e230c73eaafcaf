"""The workload on GPUs, by virtual ranks of one and by NCCL; skipped on machines without."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import distributed_cases as cases
import pytest
import storage_cases
import torch
import torch.nn.functional as F

import layouts
import spmd
from spmd import P
from spmd.job.launch import launch

DEVICE, GPUS = "cuda", torch.cuda.device_count()
STEPS = 5

pytestmark = pytest.mark.skipif(GPUS == 0, reason="no GPU")


def losses_on_the_cpu(name, axes):
    return cases.train(name, axes, "virtual", STEPS)[0]


@pytest.mark.parametrize("name", list(layouts.STRATEGIES))
def test_virtual_ranks_on_one_gpu_train_as_on_the_cpu(name):
    axes = layouts.STRATEGIES[name].mesh_of(8)
    losses, *_ = cases.train(name, axes, "virtual", STEPS, DEVICE)
    assert losses_on_the_cpu(name, axes) == pytest.approx(losses, abs=1e-4, rel=0)


@pytest.mark.parametrize("ranks", [ranks for ranks in (1, 2, 4, 8) if ranks <= max(GPUS, 1)])
@pytest.mark.parametrize("name", list(layouts.STRATEGIES))
def test_ranks_on_nccl_train_as_on_the_cpu(name, ranks):
    axes = layouts.STRATEGIES[name].mesh_of(ranks)
    losses, planned, executed, _ = launch(cases.train, ranks, name, axes, "distributed", STEPS, DEVICE)
    assert losses_on_the_cpu(name, axes) == pytest.approx(losses, abs=1e-4, rel=0)
    assert sorted(planned) == sorted(executed)


def test_gradients_outside_of_functions_are_those_of_one_device():
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual", device=DEVICE)
    whole = [torch.randn(7, 5, device=DEVICE), torch.randn(5, 3, device=DEVICE)]
    placed = [spmd.distribute(x, spec, mesh).requires_grad_() for x, spec in zip(whole, (P("x"), P()), strict=True)]
    plain = [x.requires_grad_() for x in whole]
    for x, w in (placed, plain):
        (x @ w).relu().square().sum().backward()
    for ours, theirs in zip(placed, plain, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_a_strided_view_is_traced():
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual", device=DEVICE)
    x = torch.arange(12.0, device=DEVICE)
    windows = spmd.jit(lambda x: x.as_strided((5, 4), (2, 1)), P("x"), P(), mesh=mesh)
    assert windows(x).full_tensor().equal(x.as_strided((5, 4), (2, 1)))


def test_a_job_of_one_gpu_sends_by_nccl():
    assert "nccl" == launch(cases.send_to_itself, 1, DEVICE)


OUT_OF_RANGE = """
import torch
import torch.nn.functional as F

import spmd
from spmd import P

mesh = spmd.make_mesh({"x": 4}, runtime="virtual", device="cuda")
look_up = spmd.jit({function}, (P("x"), P()), mesh=mesh)
args = {args}
look_up(*args, torch.tensor([0, 63], device="cuda"))
try:
    result = look_up(*args, torch.tensor([0, 67], device="cuda"))
    torch.cuda.synchronize()
except Exception as error:
    print(str(error).splitlines()[0])
"""


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("lambda w, i: F.embedding(i, w)", "[torch.randn(64, 8, device='cuda')]"),
        ("lambda x, i: F.cross_entropy(x.t(), i)", "[torch.randn(64, 2, device='cuda')]"),
        ("lambda x, i: x.gather(0, i)", "[torch.randn(64, device='cuda')]"),
        ("lambda x, i: x[i]", "[torch.randn(64, 3, device='cuda')]"),
        ("lambda x, i: x.index_add(0, i, x[:2])", "[torch.randn(64, 3, device='cuda')]"),
    ],
)
def test_positions_out_of_range_are_torchs_assertion(function, args):
    """In a process of its own: nothing runs on a GPU after an assertion has failed."""
    script = OUT_OF_RANGE.replace("{function}", function).replace("{args}", args)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert "device-side assert" in run.stdout, run.stdout + run.stderr


def test_results_hold_their_own():
    mesh = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual", device=DEVICE)
    assert storage_cases.results_hold_their_own(1, mesh) > 300


def test_draws_are_those_of_one_device_and_move_its_generator_as_far():
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.randn_like(x) + torch.rand(x.shape, device=x.device)

    mesh = spmd.make_mesh({"x": 4}, runtime="virtual", device=DEVICE)
    x, step = torch.ones(64, 8, device=DEVICE), spmd.jit(noisy, P("x"), P("x"), mesh=mesh)
    found = []
    for function in (noisy, lambda x: step(x).full_tensor()):
        torch.manual_seed(3)
        found.append((function(x), function(x), torch.rand(4, device=DEVICE), torch.rand(4)))
    for one, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, one)


def test_first_and_warm_calls_of_threads():
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual", device=DEVICE)
    x = torch.randn(12, 8, device=DEVICE)

    def function(number: int, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: (x.sin() * number).square().sum())(x)

    steps = [spmd.jit(lambda x, number=number: function(number, x), P("x"), P(), mesh=mesh) for number in range(4)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            results = pool.map(lambda call: steps[call % 4](x), range(16))
            for call, result in enumerate(results):
                torch.testing.assert_close(result.full_tensor(), function(call % 4, x))


def test_functions_of_the_host_get_tensors_of_the_host():
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual", device=DEVICE)
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        spmd.debug.callback(lambda value: seen.append(value.tolist()), x.sum())
        return spmd.pure_callback(lambda x: x.numpy() * 2, x, x) + 1

    x = torch.arange(6.0, device=DEVICE)
    result = spmd.jit(function, P("x"), P(), mesh=mesh)(x)
    torch.testing.assert_close(result.full_tensor(), x * 2 + 1)
    assert seen == [15.0] * 4
