"""What ranks do about the machine of a mesh on which nobody gave one."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import attrs
import pytest
import torch

import spmd
from spmd import Machine, P
from spmd.core.mesh import Mesh
from spmd.plan.machine import default
from spmd.plan.machine.link import Link

LINK = Link("data", "all_reduce", latency=1e-3, bandwidth=1e6)
MEASURED = Machine(1e9, 1e8, 1e7, latency=1e-3, links=[LINK], origin="measured on a napkin")


def forget(folder: str) -> None:
    """Have agreed on nothing, with a folder of files."""
    default._agreed_here().clear()
    os.environ["SPMD_CACHE_DIR"] = folder


def run_step(mesh: Mesh, axis: str = "data") -> tuple[Machine, Machine, str]:
    """The machines of a plan before and after the first call of a function, and the plan as text."""
    step = spmd.jit(lambda x, w: (x @ w).sum(0), (P(axis), P()), P(), mesh=mesh)
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    before = step.plan(x, w).request.machine
    assert step(x, w).full_tensor().equal(torch.full((8,), 32.0))
    plan = step.plan(x, w)
    assert plan.request.machine.origin in repr(plan)
    return before, plan.request.machine, str(plan)


def ranks_measure_once(folder: str, mesh: Mesh) -> None:
    """All ranks measure, rank 0 saves it, and a later job takes what rank 0 has, whatever files others have."""
    own = f"{folder}/{spmd.process_index()}"
    with mock.patch.object(default, "_saved", default._saved.__wrapped__):
        with mock.patch.object(Machine, "measure", return_value=MEASURED) as measure:
            forget(own)
            before, after, text = run_step(mesh)
            assert before == Machine() and "nothing was measured" in before.origin
            assert after == MEASURED and after.origin == MEASURED.origin
            assert text.startswith("# machine measured on a napkin: 1 Gflop/s, memory 100 MB/s")
            run_step(mesh)
            assert measure.call_count == 1
            files = list(Path(own).rglob("*"))
            assert [path.suffix for path in files] == ["", ".json", ".json"][: 3 if spmd.process_index() == 0 else 0]
        with mock.patch.object(Machine, "measure", side_effect=AssertionError):
            forget(own)
            before, after, _ = run_step(mesh)
            assert after == MEASURED
            assert before == (MEASURED if spmd.process_index() == 0 else Machine())
            _, other, _ = run_step(spmd.make_mesh({"model": 2}, runtime="distributed"), "model")
            assert other == attrs.evolve(MEASURED, links=[attrs.evolve(LINK, axis="model")])
        with mock.patch.object(Machine, "measure", return_value=MEASURED) as measure:
            for path in files[1:]:
                path.write_text('{"machine": {"flops": -1}}')
            for folder in (own, __file__):  # a damaged file, and a folder that cannot be
                forget(folder)
                assert run_step(mesh)[1] == MEASURED
            assert measure.call_count == 2
    forget(own)


def the_first_rank_measures_where_a_preset_has_links(folder: str, mesh: Mesh) -> None:
    """The links are the preset's, and everything else is what rank 0 measures by itself, once."""
    own, preset = f"{folder}/{spmd.process_index()}", Machine.preset("h100_nvlink", axis_latency={"data": 5e-6})
    with (
        mock.patch.object(default, "_saved", default._saved.__wrapped__),
        mock.patch.object(default, "_preset", lambda *_: preset),
        mock.patch.object(Machine, "measure", return_value=attrs.evolve(MEASURED, links=(), fuses=False)) as measure,
    ):
        for again in range(2):
            forget(own)
            before, after, text = run_step(mesh)
            assert before == (after if again and spmd.process_index() == 0 else preset)
            constants = {"flops": 1e9, "dtype_flops": {}, "memory_bandwidth": 1e8, "fuses": False}
            assert after == attrs.evolve(preset, **constants)
            assert text.startswith(
                "# machine measured on a napkin, links of preset h100_nvlink, with changes: 1 Gflop/s"
            )
        _, other, _ = run_step(spmd.make_mesh({"model": 2}, runtime="distributed"), "model")
        assert other.axis_latency == (("model", 5e-6),)
    assert [call.args[0].size for call in measure.call_args_list] == [1] * (spmd.process_index() == 0)
    forget(own)


def one_rank_gives_a_machine(folder: str, mesh: Mesh) -> None:
    """Ranks that do not all give a machine are told so, and do not wait for each other."""
    forget(folder)
    given = Machine() if spmd.process_index() == 0 else None
    step = spmd.jit(torch.sin, P("data"), P("data"), mesh=mesh, machine=given)
    with pytest.raises(spmd.DivergenceError, match=r"different calls: .*the choice of a machine for .* on rank 1"):
        step(torch.ones(4))


def a_failing_rank(folder: str, mesh: Mesh) -> None:
    """The error of a rank before it agrees reaches the others."""
    forget(folder)
    step = spmd.jit(torch.sin, P("data"), P("data"), mesh=mesh)
    fails = spmd.process_index() == 1
    with (
        mock.patch.object(default, "gather_hosts", side_effect=OSError("no name")) if fails else mock.MagicMock(),
        pytest.raises(OSError if fails else spmd.SpmdError, match="no name"),
    ):
        step(torch.ones(4))
