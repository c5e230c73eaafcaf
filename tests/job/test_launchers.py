"""Which process of a job this is, by the variables of torchrun, SLURM and MPI."""

import os
import subprocess
import sys

import pytest
import torch

from spmd.core.mesh import Runtime, make_mesh
from spmd.errors import MeshError
from spmd.job.launcher import local_rank, local_size, started
from spmd.job.process import choose_device, init, is_distributed, process_count, process_index
from spmd.plan.machine.hosts import assumed_hosts
from spmd.testing.local_job import free_port

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1234", "LOCAL_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "gpu[003-004,009]",
}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
PMI = {"PMI_RANK": "2", "PMI_SIZE": "6", "MPI_LOCALRANKID": "0"}
NAMES = (
    *TORCHRUN,
    *SLURM,
    *OPEN_MPI,
    *PMI,
    *LOCAL_SIZES,
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)


@pytest.fixture
def environment(monkeypatch):
    """Sets these variables, and no other of a launcher's."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def set_variables(*variables, **more):
        for name, value in {key: value for found in (*variables, more) for key, value in found.items()}.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (TORCHRUN, (1, 2, 1)),
        (SLURM, (5, 8, 1)),
        (OPEN_MPI, (3, 4, 3)),
        (PMI, (2, 6, 0)),
        ({**SLURM, **TORCHRUN}, (1, 2, 1)),  # torchrun as a task of SLURM's
        ({**SLURM, **OPEN_MPI}, (3, 4, 3)),  # mpirun, whose daemons are tasks of SLURM's
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 8, 1)),  # srun --mpi=pmi2
    ],
)
def test_a_launcher_says_the_rank_and_the_number_of_processes(environment, variables, place):
    environment(variables)
    found = started()
    assert place == (found.rank, found.size, local_rank(found.rank, found.size))
    assert is_distributed() and place[:2] == (process_index(), process_count())


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},  # srun -n 1
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},  # a batch script
        {**SLURM, "SLURM_STEP_ID": str(0xFFFFFFFA)},  # the shell of salloc
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {**SLURM, "RANK": "0", "WORLD_SIZE": "2"},  # half of torchrun's
    ],
)
def test_other_processes_are_no_job(environment, variables):
    environment(variables)
    assert started() is None and not is_distributed()
    init(timeout=60, check="first")  # starts nothing, as make_mesh, which makes a virtual mesh
    assert not torch.distributed.is_initialized() and make_mesh({"data": 2}).runtime is Runtime.VIRTUAL
    with pytest.raises(MeshError, match=r"timeout"):
        init(timeout=-1)
    with pytest.raises(MeshError, match=r"needs the variables that torchrun sets .*or those of several tasks of srun"):
        make_mesh({"data": 2}, runtime="distributed")


def test_a_local_rank_of_another_launcher_counts_only_if_it_numbers_the_same_processes(environment):
    environment(SLURM)
    assert 1 == local_rank(5, 8)
    assert local_rank(5, 16) is None and local_rank(0, 8) is None
    environment(LOCAL_RANK="2")
    assert 2 == local_rank(0, 16)


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, 2),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2),1"}, 4),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({**PMI, "MPI_LOCALNRANKS": "3"}, 3),
        ({**OPEN_MPI, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, None),  # the tasks are daemons
        (SLURM, None),
    ],
)
def test_the_processes_on_a_machine_are_counted_as_the_launcher_says(environment, variables, count):
    environment(variables)
    found = started()
    assert count == local_size(found.rank, found.size)
    hosts = assumed_hosts(make_mesh({"x": found.size}, runtime="abstract"))
    assert tuple(rank // (count or found.size) for rank in range(found.size)) == hosts


def test_a_slurm_step_meets_on_its_first_host(environment):
    environment(SLURM)
    host, port = started().address
    assert "gpu003" == host and 61440 <= port < 65536
    environment(SLURM_STEP_ID="1")
    assert port != started().address[1]
    environment(MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    assert ("10.0.0.1", 29500) == started().address


@pytest.mark.parametrize("variables", [OPEN_MPI, PMI, {**SLURM, "SLURM_STEP_NODELIST": ""}])
def test_where_rank_0_is_unknown_an_error_says_what_to_export(environment, variables):
    environment(variables)
    with pytest.raises(MeshError, match=r"Export MASTER_ADDR, .* and MASTER_PORT"):
        init()


def test_a_variable_that_is_no_number_is_named(environment):
    environment(TORCHRUN, RANK="one")
    with pytest.raises(MeshError, match=r"RANK must be a number \(got 'one'\)"):
        init()


@pytest.fixture
def gpus(monkeypatch):
    """A machine with these GPUs; the list has which were taken."""
    taken = []

    def set_count(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: count - 1)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        return taken

    return set_count


WITHOUT_LOCAL_RANK = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}


@pytest.mark.parametrize(
    ("variables", "count", "index"),
    [
        (TORCHRUN, 8, 1),
        (SLURM, 8, 1),
        (OPEN_MPI, 8, 3),
        (PMI, 8, 0),
        ({**SLURM, **TORCHRUN, "SLURM_LOCALID": "7"}, 8, 1),
        ({}, 8, 7),  # a job of one process: the current GPU
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "3"}, 1, 0),  # each task sees a GPU of its own
        (WITHOUT_LOCAL_RANK, 1, 0),  # a container for each process
    ],
)
def test_each_process_takes_one_gpu(environment, gpus, variables, count, index):
    environment(variables)
    taken = gpus(count)
    assert torch.device("cuda") == choose_device(torch.device("cuda"))
    assert [index] == taken


@pytest.mark.parametrize(
    ("variables", "count", "message"),
    [
        (WITHOUT_LOCAL_RANK, 2, r"Rank 1 of 2 sees 2 GPUs and does not know which one is its own\. Set LOCAL_RANK"),
        ({**TORCHRUN, "CUDA_VISIBLE_DEVICES": "0"}, 1, r"Rank 1 wants GPU 1, but there are 1 here\. Start at most"),
        (SLURM, 1, "Rank 5 wants GPU 1, but there are 1 here"),
        ({}, 0, "Rank 0 wants GPU 0, but there are 0 here"),
    ],
)
def test_a_process_does_not_guess_its_gpu(environment, gpus, variables, count, message):
    environment(variables)
    taken = gpus(count)
    with pytest.raises(MeshError, match=message):
        choose_device(torch.device("cuda"))
    assert not taken


SCRIPT = """
import torch, spmd
from spmd import P

mesh = spmd.make_mesh({"x": 2})
total = spmd.jit(lambda x: x.sum(), P("x"), P(), mesh=mesh)
print(spmd.process_index(), mesh.runtime.value, total(torch.arange(4.0)).item())
"""


@pytest.mark.parametrize("rank", ["SLURM_PROCID", pytest.param("OMPI_COMM_WORLD_RANK", marks=pytest.mark.slow)])
def test_tasks_of_slurm_and_mpi_meet(environment, rank):
    environment(SLURM if rank in SLURM else OPEN_MPI, SLURM_NTASKS="2", OMPI_COMM_WORLD_SIZE="2")
    environment({"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port())})
    if rank in OPEN_MPI:
        environment(MASTER_ADDR="localhost")
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, rank: str(number), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        printed = [task.communicate(timeout=240)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert ["0 distributed 6.0\n", "1 distributed 6.0\n"] == printed
