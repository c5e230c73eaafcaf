import copy
import pickle
from datetime import timedelta

import pytest
import torch
from hypothesis import given

from spmd.core.mesh import Mesh, Runtime, current_mesh, make_mesh, use_mesh
from spmd.errors import MeshError
from spmd.job.process import choose_device, init, process_count, process_index
from spmd.testing.strategies import meshes


@given(meshes())
def test_rank_and_coordinate_are_inverse(mesh):
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert list(mesh.coordinates()) == coordinates
    assert list(range(mesh.size)) == [mesh.rank(coordinate) for coordinate in coordinates]


def test_the_last_axis_varies_fastest():
    mesh = make_mesh({"data": 2, "model": 3})
    assert [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] == list(mesh.coordinates())


@given(meshes())
def test_groups_partition_the_ranks_in_axis_order(mesh):
    for axes in (mesh.names, tuple(reversed(mesh.names)), mesh.names[:1], ()):
        groups = mesh.groups(axes)
        assert list(range(mesh.size)) == sorted(rank for group in groups for rank in group)
        for group in groups:
            indices = [mesh.axis_index(mesh.coordinate(rank), axes) for rank in group]
            assert list(range(mesh.axis_size(axes))) == indices


def test_groups_over_several_axes_follow_the_order_of_the_axes():
    mesh = make_mesh({"data": 2, "model": 2})
    assert ((0, 1, 2, 3),) == mesh.groups(("data", "model"))
    assert ((0, 2, 1, 3),) == mesh.groups(("model", "data"))


def test_axis_sizes():
    mesh = make_mesh({"data": 2, "model": 3})
    assert {"data": 2, "model": 3} == mesh.axes
    assert (6, 3, 6, 1) == (mesh.size, mesh.axis_size("model"), mesh.axis_size(("model", "data")), mesh.axis_size(()))


@given(meshes())
def test_meshes_are_values(mesh):
    same = make_mesh(mesh.axes, runtime="virtual")
    assert (mesh, hash(mesh)) == (same, hash(same))
    assert mesh == pickle.loads(pickle.dumps(mesh)) == copy.deepcopy(mesh)
    assert mesh != make_mesh({**mesh.axes, "more": 1}, runtime="virtual")
    assert mesh != make_mesh(mesh.axes, runtime="abstract")


def test_a_hash_is_not_carried_to_another_process():
    mesh = make_mesh({"data": 2})
    hash(mesh)
    restored = pickle.loads(pickle.dumps(mesh))
    assert {mesh: 1}[restored] == 1


def test_str():
    assert "Mesh(data=2, model=4)" == str(make_mesh({"data": 2, "model": 4}))


def test_device():
    assert torch.device("cpu") == make_mesh({"data": 2}).device
    assert torch.device("meta") == make_mesh({"data": 2}, device="meta").device


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({}, "needs at least one axis"),
        ({"data": 0}, "'data' must have a positive integer size .got 0."),
        ({"data": 2.0}, "must have a positive integer size .got 2.0."),
        ({"data": True}, "must have a positive integer size .got True."),
        ({"a b": 2}, "must be identifiers .got 'a b'."),
        ({3: 2}, "must be identifiers .got 3."),
        ((2, 4), "axes must map names to sizes, as make_mesh"),
    ],
)
def test_malformed_meshes(axes, text):
    with pytest.raises(MeshError, match=text):
        make_mesh(axes)


def test_malformed_meshes_made_directly():
    with pytest.raises(MeshError, match=r"must be unique .got data, data."):
        Mesh(("data", "data"), (2, 2))
    with pytest.raises(MeshError, match="one size an axis"):
        Mesh(("data",), (2, 2))


def test_wrong_lookups_name_the_mesh():
    mesh = make_mesh({"data": 2, "model": 4})
    with pytest.raises(MeshError, match=r"Unknown mesh axis 'tp': Mesh.data=2, model=4. has axes 'data', 'model'"):
        mesh.axis_size("tp")
    with pytest.raises(MeshError, match=r"Rank must be in 0\.\.7 of Mesh.data=2, model=4. .got 8."):
        mesh.coordinate(8)
    for coordinate in ((2, 0), (0, -1), (0,)):
        with pytest.raises(MeshError, match="Coordinate must lie in Mesh"):
            mesh.rank(coordinate)


def test_runtimes(monkeypatch):
    assert Runtime.ABSTRACT is make_mesh({"data": 65536}, runtime="abstract").runtime
    assert Runtime.VIRTUAL is make_mesh({"data": 2}).runtime
    with pytest.raises(MeshError, match=r"runtime must be 'auto'.* \(got 'real'\)"):
        make_mesh({"data": 2}, runtime="real")
    with pytest.raises(
        MeshError, match=r"variables that torchrun sets \(missing: RANK, WORLD_SIZE, .*torchrun --nproc"
    ):
        make_mesh({"data": 2}, runtime="distributed")
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=r"Mesh\(data=2\) has 2 ranks, but the job has 3 processes\. Choose axes whose"):
        make_mesh({"data": 2})


@pytest.mark.parametrize("timeout", [0, -1.0, timedelta(0)])
def test_timeouts_are_positive(timeout):
    with pytest.raises(MeshError, match="timeout must be positive"):
        init(timeout=timeout)


def test_outside_of_a_job_there_is_one_process():
    assert (0, 1) == (process_index(), process_count())


def test_use_mesh_nests_and_ends():
    outer, inner = make_mesh({"data": 2}), make_mesh({"model": 2})
    with use_mesh(outer):
        with use_mesh(inner):
            assert inner == current_mesh()
            assert outer == current_mesh(outer)
        assert outer == current_mesh()
    with pytest.raises(MeshError, match="No mesh was given and none is set"):
        current_mesh()


def test_each_process_takes_the_gpu_of_its_local_rank(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert torch.device("cuda") == choose_device(torch.device("cuda")) == choose_device(torch.device("cuda:0"))
    assert [1, 0] == chosen
    assert torch.device("cpu") == choose_device(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(MeshError, match=r"wants GPU 2, but there are 2 here\. Start at most one process a GPU"):
        choose_device(torch.device("cuda"))


def distributed(axes, ranks=None):
    return Mesh(tuple(axes), tuple(axes.values()), Runtime.DISTRIBUTED, "cpu", ranks)


def test_ranks_are_numbers_of_processes():
    mesh = distributed({"data": 2, "model": 2}, (5, 4, 1, 0))
    assert (5, 4, 1, 0) == mesh.ranks
    assert (((0, 1), (2, 3)), (1, 0)) == (mesh.groups(("model",)), mesh.coordinate(2))
    assert (0, 1, 2) == make_mesh({"data": 3}, runtime="virtual").ranks == make_mesh({"x": 3}, runtime="abstract").ranks


def test_meshes_over_other_processes_differ():
    mesh, other = distributed({"data": 2}, (0, 1)), distributed({"data": 2}, (2, 3))
    assert (mesh, hash(mesh)) == (distributed({"data": 2}), hash(distributed({"data": 2})))
    assert mesh != other and other != distributed({"data": 2}, (3, 2))
    assert other == pickle.loads(pickle.dumps(other)) == copy.deepcopy(other) == distributed({"data": 2}, [2, 3])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (None, "Mesh(data=3)"),
        (range(3), "Mesh(data=3)"),
        (range(3, 6), "Mesh(data=3, ranks=range(3, 6))"),
        ((0, 4, 2), "Mesh(data=3, ranks=(0, 4, 2))"),
    ],
)
def test_str_has_the_processes(ranks, text):
    assert text == str(distributed({"data": 3}, ranks))


def test_str_has_some_of_many_processes():
    assert str(distributed({"data": 17}, range(0, 34, 2))).endswith(
        "ranks=(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, ...))"
    )


@pytest.mark.parametrize("runtime", ["virtual", "abstract"])
def test_a_part_has_some_axes_in_their_order(runtime):
    mesh = make_mesh({"pipe": 2, "data": 3, "model": 4}, runtime=runtime)
    assert make_mesh({"data": 3}, runtime=runtime) == mesh["data"]
    assert make_mesh({"model": 4, "pipe": 2}, runtime=runtime) == mesh["model", "pipe"]
    assert mesh == mesh["pipe", "data", "model"]


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ("expert", r"Unknown mesh axis 'expert': Mesh\(data=2\) has axes 'data'\."),
        (0, "Unknown mesh axis 0"),
        ((), "needs at least one axis"),
        (("data", "data"), "must be unique"),
    ],
)
def test_wrong_parts_are_refused(axes, text):
    with pytest.raises(MeshError, match=text):
        make_mesh({"data": 2}, runtime="virtual")[axes]


def test_a_mesh_is_no_sequence():
    with pytest.raises(TypeError, match="not iterable"):
        list(make_mesh({"data": 2}))


@pytest.mark.parametrize(
    ("ranks", "runtime", "text"),
    [
        ((1, 1), Runtime.DISTRIBUTED, r"ranks must be 2 different processes for the axes data=2 \(got 2: \(1, 1\)\)"),
        ((1,), Runtime.DISTRIBUTED, r"got 1: \(1,\)"),
        ((2, 3), Runtime.VIRTUAL, "Only a distributed mesh has ranks of its own"),
    ],
)
def test_wrong_ranks_are_refused(ranks, runtime, text):
    with pytest.raises(MeshError, match=text):
        Mesh(("data",), (2,), runtime, "cpu", ranks)
