"""Meshes over some of the processes of a job, side by side, and parts of a mesh along some of its axes."""

import re

import pytest
import submesh_cases as cases


def test_two_meshes_run_side_by_side(workers):
    printed = workers.run(cases.run_side_by_side, ranks=4)
    shards = "[rank 3] has tensor([0., 1., 2., 3., 4.])\n[rank 2] has tensor([5., 6., 7., 8., 9.])\n"
    assert ["", "", "", shards] == printed


def test_a_part_of_a_mesh_is_over_the_processes_of_this_one(workers):
    columns, rows, turned = ((0, 2), (1, 3)), ((0, 1), (2, 3)), (0, 2, 1, 3)
    found = workers.run(cases.slice_mesh, ranks=4)
    assert [[columns[me % 2], rows[me // 2], (0, 1, 2, 3), turned] for me in range(4)] == found


def test_processes_outside_say_so_at_once(workers):
    _, _, *found = workers.run(cases.stay_outside, ranks=4)
    for me, errors in enumerate(found, start=2):
        expected = (
            f"MeshError: This process is rank {me} of the job, and Mesh(x=2) has ranks 0, 1. Guard what runs on the "
            "mesh: `if spmd.process_index() in mesh.ranks:`."
        )
        assert [expected] * 12 == errors


def test_wrong_processes_are_refused(workers):
    for found in workers.run(cases.refuse_arguments, ranks=4):
        expected = [
            r"ranks must be 2 different processes for the axes x=2 \(got 3: range\(0, 3\)\)\. Give one for each rank",
            r"ranks must be 2 different processes for the axes x=2 \(got 2: \(1, 1\)\)",
            r"ranks must be processes of the job, which has the 4 of 0 to 3 \(got \(0, 4\)\)\. .*--nproc-per-node 5`",
            r"ranks must be 2 different processes for the axes x=2 \(got 2: \(0, -1\)\)",
            r"ranks must be numbers of processes, such as range\(2\) \(got \(0, 1\.5\)\)",
            r"ranks are the processes of a distributed mesh \(got ranks=range\(0, 2\) for .* which is virtual",
            r"ranks are the processes of a distributed mesh \(got .* which is abstract\)\. Leave them out here",
            r"Mesh\(x=2\) has 2 ranks, but the job has 4 .* or choose some of them: .* ranks=range\(2\)\)",
            r"Unknown mesh axis 'pipe': Mesh\(data=2, model=2\) has axes 'data', 'model'",
        ]
        for pattern, error in zip(expected, found, strict=True):
            assert re.match(f"MeshError: {pattern}", error), error


def test_values_stay_on_their_mesh(workers):
    for me, (function, tree) in enumerate(workers.run(cases.refuse_other_meshes, ranks=4)):
        part = "Mesh(model=2)" if me < 2 else "Mesh(model=2, ranks=range(2, 4))"
        assert f"is on Mesh(data=2, model=2), but the function runs on {part}" in function
        assert "MeshError: The leaves of a checkpoint must be on meshes over the same processes (got Mesh(" in tree


def test_halves_save_and_load(workers, tmp_path):
    workers.run(cases.save_and_load, str(tmp_path), ranks=4)
    first, *_ = workers.run(cases.refuse_a_folder, str(tmp_path), ranks=4)[2:]
    assert re.match(r"DivergenceError: the path differs between ranks: \S+/2 on rank 2; \S+/3 on rank 3", first)


def test_ranks_that_part_in_a_half_are_named_by_their_processes(workers):
    *first, two, three = workers.run(cases.part_in_a_half, ranks=4)
    assert [["285.0"] * 9] * 2 == first
    expected = [
        r"DivergenceError: leaf differs between ranks: \S+ with digest \w+ on rank 3; \S+ with digest \w+ on rank 2",
        r"DivergenceError: In from_process_data.* leaf differs between ranks: .* on rank 3; .* on rank 2\.",
        r"DivergenceError: The function differs between ranks: sin on rank 3; cos on rank 2",
        r"SpmdError: (no such layer|Rank 3 failed in the first run of .*: SpmdError: no such layer)",
        r"DivergenceError: Ranks have run different programs: .* on rank 3; .* on rank 2",
        r"DivergenceError: .* on rank 3.* on rank 2",
        r"DivergenceError: Ranks run different collectives: rank 3 .*, where rank 2 ",
    ]
    for errors in (two, three):
        for pattern, error in zip(expected, errors, strict=True):
            assert re.match(pattern, error), error


def test_torchs_device_mesh_may_be_over_some_processes(workers):
    for error in workers.run(cases.convert, ranks=4):
        assert error.startswith("MeshError: torch's groups have their processes in ascending order (got (3, 2, 1, 0) ")


def test_a_mesh_of_one_process_needs_no_others(workers):
    assert [0] * 4 == workers.run(cases.run_alone, ranks=4)


@pytest.mark.slow
def test_halves_measure_their_machines(workers):
    found = workers.run(cases.measure, ranks=4)
    assert found[0] == found[1] and found[2] == found[3]
    assert "2 gloo processes on 1 host" in found[0][1]
