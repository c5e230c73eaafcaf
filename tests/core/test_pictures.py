"""Pictures of shardings say of every block which ranks hold it, as `local_slices` of every rank says."""

import io
import itertools
import re
import xml.etree.ElementTree as ET

import pytest
import torch

from spmd import DTensorSpec, P, TensorMeta, make_mesh
from spmd.core.pictures.blocks import rank_text
from spmd.core.pictures.grid import make_grid

MESH = make_mesh({"data": 2, "model": 4}, runtime="virtual")
CUBE = make_mesh({"x": 2, "y": 2, "z": 2}, runtime="abstract")
LARGE = make_mesh({"pod": 16, "data": 64, "model": 64}, runtime="abstract")

CASES = [
    (MESH, P("data", "model"), (5, 8)),
    (MESH, P("model", "data"), (5, 3)),
    (MESH, P("data"), (5, 8)),
    (MESH, P(), (5, 8)),
    (MESH, P(None, ("model", "data")), (5, 8)),
    (MESH, P(("data", "model")), (5,)),
    (MESH, P("model"), (5,)),
    (MESH, P("model"), (1, 4)),
    (MESH, P(), ()),
    (MESH, P("data", partial={"model": "sum"}), (5, 8)),
    (MESH, P(partial={"model": "max"}), (4, 3)),
    (MESH, P("data", None, "model"), (8, 3, 12)),
    (CUBE, P("x", "y", "z"), (8, 3, 2)),
    (CUBE, P("x", None, ("z", "y")), (2, 3, 7)),
]


def make_spec(mesh, spec, shape):
    return DTensorSpec.make(mesh, spec, TensorMeta(shape, torch.float32))


@pytest.mark.parametrize(("mesh", "spec", "shape"), CASES, ids=str)
def test_blocks_are_those_of_the_ranks(mesh, spec, shape):
    made = make_spec(mesh, spec, shape)
    blocks = made.picture.blocks
    wanted = {}
    for rank, coordinate in enumerate(mesh.coordinates()):
        bounds = tuple((part.start, part.stop) for part in made.local_slices(coordinate))
        wanted.setdefault(bounds, set()).add(rank)
    empty = {rank for bounds, ranks in wanted.items() if any(a == b for a, b in bounds) for rank in ranks}
    found = {}
    for chunks in itertools.product(*(dim.filled for dim in blocks.dims)):
        bounds = tuple(dim.bounds[number] for dim, number in zip(blocks.dims, chunks, strict=True))
        found[bounds] = {rank for copy in blocks.holders(chunks) for rank in copy}
        assert blocks.copies * blocks.terms == len(found[bounds])
    assert {bounds: ranks for bounds, ranks in wanted.items() if not ranks & empty} == found
    assert tuple(sorted(empty)) == blocks.empty


@pytest.mark.parametrize(("mesh", "spec", "shape"), CASES, ids=str)
def test_texts_and_svg_have_a_cell_for_every_block(mesh, spec, shape):
    picture = make_spec(mesh, spec, shape).picture
    grid = make_grid(picture.blocks, 16)
    texts = [cell.text for panel in grid.panels for row in panel.cells for cell in row]
    drawn = ET.fromstring(picture.svg)
    labels = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert len(texts) == len(list(drawn.iter("{http://www.w3.org/2000/svg}rect")))
    for text in texts:
        assert f" {text} " in str(picture)
        assert text in labels
    assert {*grid.notes, grid.title, *grid.captions} <= set(labels)


def test_the_terms_of_a_sum_are_told_from_copies():
    assert "sum of 0-3" in str(make_spec(MESH, P("data", partial={"model": "sum"}), (2, 2)).picture)
    assert "max of 0-3; max of 4-7" in str(make_spec(MESH, P(partial={"model": "max"}), (2, 2)).picture)


def test_shard_order_shows():
    cells = re.findall(r"│ +0 .*", str(make_spec(MESH, P(None, ("model", "data")), (1, 8)).picture))
    assert [["0", "4", "1", "5", "2", "6", "3", "7"]] == [re.findall(r"\d", line) for line in cells]


@pytest.mark.parametrize("spec", [P(("pod", "data"), "model"), P("data"), P(None, "model"), P()], ids=str)
def test_many_ranks_are_left_out(spec):
    picture = make_spec(LARGE, spec, (65536, 8192)).picture
    lines = str(picture).splitlines()
    assert len(lines) < 45
    assert max(map(len, lines)) < 150
    assert 1 + 16 * 16 > picture.svg.count("<rect") > 0
    assert "65535" in str(picture) or spec != P(("pod", "data"), "model")


def test_mesh_picture_is_the_grid_of_ranks():
    text = str(MESH.picture)
    assert ["0", "1", "2", "3"] == re.findall(r"\d", text.splitlines()[5])[1:]
    assert text == repr(MESH.picture)
    assert "the first 4 of 16 panels" in str(LARGE.picture)


def test_processes_have_their_numbers():
    part = make_mesh({"x": 2}, runtime="virtual")
    blocks = part.picture.blocks
    assert ("4", "7") == tuple(
        type(blocks)(blocks.title, blocks.axes, (4, 7), blocks.dims).holders_text((n,)) for n in (0, 1)
    )


def test_rich_shows_the_same_cells():
    console = pytest.importorskip("rich.console").Console(width=120, record=True, file=io.StringIO())
    console.print(make_spec(MESH, P("data", "model"), (5, 8)).picture)
    text = console.export_text()
    assert ["0:3", "0", "1", "2", "3"] == re.findall(r"[\d:]+", text.splitlines()[6])


def test_a_file_is_dark_on_white(tmp_path):
    MESH.picture.save(tmp_path / "mesh.svg")
    drawn = ET.parse(tmp_path / "mesh.svg").getroot()
    assert "white" == drawn[0].get("fill")
    assert "#1a1a1a" == drawn.get("color")


def test_ranges_of_ranks():
    assert "0-3, 8" == rank_text([0, 1, 2, 3, 8], 16)
    assert "0, 1" == rank_text([0, 1], 16)
    assert "0-63, ... (1024 ranks)" == rank_text([*range(64), *range(4096, 4096 + 960)], 12)
