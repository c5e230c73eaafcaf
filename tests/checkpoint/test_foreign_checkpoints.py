"""Checkpoints that are damaged, or made to do harm: nothing in them runs, and nothing but what was saved comes out."""

import collections
import copy
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import re
import sys
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

import spmd
from spmd import CheckpointError, P, TensorMeta
from spmd.checkpoint import exists, load, save, saved

MESH = spmd.make_mesh({"data": 2, "model": 3}, runtime="virtual")
TREE = {
    "w": spmd.distribute(torch.arange(35.0).view(5, 7), P("model", "data"), MESH),
    "b": torch.arange(6, dtype=torch.int64),
    "step": 3,
    "name": "a run",
}
BARE = {"w": P("data"), "b": P(), "step": 0, "name": ""}
"""What takes shapes and dtypes from the checkpoint."""

GIVEN = {"w": TREE["w"], "b": TREE["b"], "step": 0, "name": ""}
"""What says which shapes and dtypes it expects."""


@pytest.fixture
def folder(tmp_path):
    """The folder of one save."""
    save(TREE, tmp_path / "checkpoint")
    (folder,) = saved(tmp_path / "checkpoint")
    return folder


@pytest.fixture
def torchs(tmp_path):
    """A checkpoint by torch's own tools, which has no checksums."""
    folder = tmp_path / "torchs"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = {name: leaf.full_tensor() if name == "w" else leaf for name, leaf in TREE.items()}
        dcp.save(plain, checkpoint_id=folder)
    return folder


def is_right(loaded):
    w, b = loaded["w"].full_tensor(), loaded["b"]
    b = b.full_tensor() if isinstance(b, spmd.DTensor) else b
    same = (torch.equal(w, TREE["w"].full_tensor()), torch.equal(b, TREE["b"]), w.dtype is torch.float32)
    return all(same) and (loaded["step"], loaded["name"]) == (3, "a run")


def outcome(folder, like):
    """`refused` or `right`; any other error, and any other value, fails."""
    try:
        loaded = load(folder, like, mesh=MESH)
    except CheckpointError:
        return "refused"
    assert is_right(loaded)
    return "right"


def data_file(folder):
    (path,) = folder.glob("**/*.distcp")
    return path


def parts(folder):
    """The pickle and the document of a `.metadata`."""
    data = (folder / ".metadata").read_bytes()
    length = int(re.search(rb"bytes ([0-9]{16})", data)[1])
    start = data.rindex(b"\nspmd manifest") - length
    return data[:start], json.loads(data[start : start + length])


def write_metadata(folder, pickled, document=None):
    """Write a `.metadata` whose checksum is right."""
    if document is not None:
        text = json.dumps(document).encode()
        pickled += text + f"\nspmd manifest 1, bytes {len(text):016}, sha256 ".encode()
        pickled += hashlib.sha256(pickled).hexdigest().encode() + b"\n"
    (folder / ".metadata").write_bytes(pickled)


# what runs


class Call:
    """Pickles as a call, or as a part of an object that is built."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def bombs(path):
    """Pickles that make a folder at `path` when they are loaded, by every opcode that names something."""
    call, name = Call(os.mkdir, (str(path),)), str(path).encode()
    described = dcp_metadata.Metadata({}, planner_data=call, storage_data={})
    keyed = dcp_metadata.Metadata({}, storage_data={dcp_metadata.MetadataIndex("w"): call})
    yield from (pickle.dumps(item, protocol) for item in (call, described, keyed, [call]) for protocol in (0, 2, 4, 5))
    yield b"cos\nmkdir\n(V" + name + b"\ntR."
    yield b"(V" + name + b"\nios\nmkdir\n."
    yield b"(cos\nmkdir\nV" + name + b"\no."
    yield b"cbuiltins\neval\n(V__import__('os').mkdir('" + name + b"')\ntR."
    yield b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93\x8c" + bytes([len(name)]) + name + b"\x85R."
    yield b"\x80\x02\x82\x01(V" + name + b"\ntR."
    yield b"\x80\x02Vos.mkdir\nQ(V" + name + b"\ntR."
    yield b"ctorch.serialization\n_get_layout\n(cos\nmkdir\ntR."
    yield b"ctorch\nload\n(V" + name + b"\ntR."
    yield b"ctorch.distributed.checkpoint.metadata\nos.mkdir\n(V" + name + b"\ntR."
    yield b"ctorch.distributed.checkpoint.filesystem\nos\n(V" + name + b"\ntR."


def test_pickles_that_run_something_are_refused(folder, tmp_path):
    ran = tmp_path / "ran"
    for bomb in bombs(ran):
        write_metadata(folder, bomb)
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
            load(folder, BARE, mesh=MESH)
        assert not ran.exists(), bomb


def test_the_bombs_of_these_tests_go_off(tmp_path):
    for bomb in itertools.islice(bombs(tmp_path / "ran"), 21):  # the others are not even pickles
        pickle.loads(bomb)
        (tmp_path / "ran").rmdir()


def test_of_what_is_saved_here_the_pickle_is_not_read(folder, tmp_path):
    _, document = parts(folder)
    for bomb in bombs(tmp_path / "ran"):
        write_metadata(folder, bomb, document)
        assert is_right(load(folder, BARE, mesh=MESH))
    assert not (tmp_path / "ran").exists()


def test_pickles_cannot_change_classes(folder):
    before = dict(vars(dcp_metadata.Metadata))
    classes = [
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        b"ctorch\nSize\n",
        b"ctorch\nfloat32\n",
        b"ctorch.serialization\n_get_layout\n",
    ]
    for name in classes:
        for state in (b"(N(dV__init__\nctorch\nSize\nst", b"(dV__reduce__\nctorch\nSize\ns", b"N"):
            write_metadata(folder, name + state + b"b.")
            with pytest.raises(CheckpointError, match="cannot be read"):
                load(folder, BARE, mesh=MESH)
    assert before == dict(vars(dcp_metadata.Metadata))
    assert not hasattr(torch.serialization._get_layout, "__reduce__ ")
    assert torch.Size((1, 2)) == (1, 2)


def test_objects_in_data_are_refused(tmp_path):
    ran = tmp_path / "ran"
    for number, leaf in enumerate((Call(os.mkdir, (str(ran),)), [Call(os.mkdir, (str(ran),))], {1, 2})):
        folder = tmp_path / f"objects{number}"
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.save({"x": leaf}, checkpoint_id=folder, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
        with pytest.raises(CheckpointError, match="Leaf x of the checkpoint is not a number or text"):
            load(folder, {"x": 0})
        with pytest.raises(CheckpointError, match="x: a number or text in the checkpoint"):
            load(folder, {"x": TensorMeta((), torch.float32)})
    assert not ran.exists()


@pytest.mark.parametrize("value", [[1, 2], {"a": torch.ones(2)}, None, torch.Size((1,)), torch.float32])
def test_values_are_numbers_or_text(tmp_path, value):
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"x": value}, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    with pytest.raises(CheckpointError, match="Leaf x of the checkpoint is not a number or text"):
        load(tmp_path, {"x": 0})


def replace_data(folder, name, data):
    """Put other bytes in place of a chunk, with a checksum that is right."""
    pickled, document = parts(folder)
    part = (document["tensors"][name]["chunks"] if name in document["tensors"] else [document["values"][name]])[0]
    path = folder / part["file"]
    part.update(offset=path.stat().st_size, length=len(data), crc32=__import__("zlib").crc32(data))
    path.write_bytes(path.read_bytes() + data)
    write_metadata(folder, pickled, document)


def stored(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def zipped(pickled, **others):
    """An archive as of torch.save, with a pickle of our own."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little", **others}.items():
            archive.writestr(f"archive/{name}", data)
    return file.getvalue()


def test_bombs_in_data_are_refused(folder, tmp_path):
    ran = tmp_path / "ran"
    sound = parts(folder)
    for number, bomb in enumerate(bombs(ran)):
        for name in ("b", "step")[number % 2 :][:1]:
            for data in (bomb, zipped(bomb), zipped(bomb, **{"constants.pkl": bomb})):
                write_metadata(folder, *sound)
                replace_data(folder, name, data + b" " * 48)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    assert "refused" == outcome(folder, BARE)
                assert not ran.exists()


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(7),
        torch.arange(6.0),
        torch.arange(6).view(2, 3),
        torch.arange(6).view(6, 1),
        torch.tensor(5),
        torch.arange(6, device="meta"),
        torch.eye(6, dtype=torch.int64).to_sparse(),
        torch.nn.Parameter(torch.arange(6.0)),
        [torch.arange(6)],
        6,
    ],
    ids=str,
)
def test_chunks_of_another_shape_dtype_or_kind_are_refused(folder, value):
    replace_data(folder, "b", stored(value) + b" " * 48)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "refused" == outcome(folder, GIVEN)


# paths


NAMES = [
    "../secret",
    "data/../../secret",
    "/etc/passwd",
    "//host/share",
    "C:\\secret",
    "C:secret",
    "..\\secret",
    "\\\\host\\share",
    "",
    ".",
    "..",
    "./secret",
    "data//secret",
    "data/",
    "\0",
    "a\nb",
    "~/../secret",
    "file:///etc/passwd",
    "x" * 300,
    "x/" * 2000,
    "\ud800",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_leave_the_folder_are_refused(folder, name):
    (folder.parent / "secret").write_bytes(data_file(folder).read_bytes())
    pickled, document = parts(folder)
    for part in (*document["tensors"]["w"]["chunks"], document["values"]["step"]):
        changed = copy.deepcopy(document)
        target = (
            changed["values"]["step"] if part is document["values"]["step"] else changed["tensors"]["w"]["chunks"][0]
        )
        target["file"] = name
        write_metadata(folder, pickled, changed)
        with pytest.raises(CheckpointError, match="is not the name of a file in the checkpoint's folder"):
            load(folder, BARE, mesh=MESH)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "\ud800"], ids=ascii)
def test_names_in_pickles_that_leave_the_folder_are_refused(torchs, name):
    (torchs.parent / "secret").write_bytes(data_file(torchs).read_bytes())
    metadata = pickle.loads((torchs / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    write_metadata(torchs, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is not the name of a file in the checkpoint's folder"):
        load(torchs, BARE, mesh=MESH)


def test_links_that_leave_the_folder_are_refused(folder):
    path = data_file(folder)
    outside = folder.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(CheckpointError, match="is a link to a file elsewhere"):
        load(folder, BARE, mesh=MESH)
    path.unlink()
    outside.rename(path)
    moved = folder.parent.parent / folder.name
    folder.rename(moved)
    folder.symlink_to(moved)
    with pytest.raises(CheckpointError, match="is a link to a file elsewhere"):
        load(folder.parent, BARE, mesh=MESH)


def test_links_to_a_folder_and_inside_of_it_are_followed(folder):
    link = folder.parent / "latest"
    link.symlink_to(folder)
    path = data_file(folder)
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))
    assert is_right(load(link, BARE, mesh=MESH))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders")
def test_files_that_are_no_files_are_refused(folder):
    path = data_file(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="is missing"):
        load(folder, BARE, mesh=MESH)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(CheckpointError, match="is missing"):
        load(folder, BARE, mesh=MESH)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="is missing"):
        load(folder, BARE, mesh=MESH)


# damage


@pytest.mark.parametrize("step", [41, pytest.param(1, marks=pytest.mark.slow)])
def test_a_cut_metadata_is_refused(folder, step):
    sound = (folder / ".metadata").read_bytes()
    pickled, _ = parts(folder)
    for length in sorted({*range(0, len(sound), step), len(pickled), len(sound) - 1}):
        (folder / ".metadata").write_bytes(sound[:length])
        if length == len(pickled):  # what an earlier version wrote: complete, and with checksums of its data
            assert is_right(load(folder, BARE, mesh=MESH))
            continue
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
            load(folder, BARE, mesh=MESH)


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_the_metadata_is_refused(folder, step):
    sound = (folder / ".metadata").read_bytes()
    for bit in range(0, 8 * len(sound), step):
        (folder / ".metadata").write_bytes(flipped(sound, bit))
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
            load(folder, BARE, mesh=MESH)


@pytest.mark.parametrize("count", [30, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_flipped_bit_or_a_cut_of_the_data_is_refused(folder, count):
    path = data_file(folder)
    sound = path.read_bytes()
    draw = random.Random(0)
    for _ in range(count):
        path.write_bytes(flipped(sound, draw.randrange(8 * len(sound))))
        with pytest.raises(CheckpointError, match="are not those that were written"):
            load(folder, BARE, mesh=MESH)
        path.write_bytes(sound[: draw.randrange(len(sound))])
        with pytest.raises(CheckpointError, match="is incomplete"):
            load(folder, BARE, mesh=MESH)


def flipped(data, bit):
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_damage_to_what_torch_saved_gives_no_other_errors(torchs, count):
    draw = random.Random(count)
    found = collections.Counter()
    for path in (torchs / ".metadata", data_file(torchs)):
        sound = path.read_bytes()
        for number in range(count):
            bit = draw.randrange(8 * len(sound))
            path.write_bytes(sound[: bit // 8] if number % 5 == 0 else flipped(sound, bit))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[path.name, outcome(torchs, GIVEN)] += 1
        path.write_bytes(sound)
    assert found[".metadata", "refused"] > count // 2


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_manifests_with_other_things_in_them_give_no_other_errors(folder, count):
    pickled, document = parts(folder)
    draw = random.Random(count)
    refused = 0
    for _ in range(count):
        changed = copy.deepcopy(document)
        edit(changed, draw)
        write_metadata(folder, pickled, changed)
        try:
            load(folder, draw.choice([BARE, GIVEN]), mesh=MESH)
        except CheckpointError:
            refused += 1
    assert refused > count // 2


def edit(document, draw):
    """Change one thing somewhere in a document: take it away, put another kind or number there, or move it."""
    places = [(document, key) for key in document]
    for container, key in places:
        item = container[key]
        keys = item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        places += [(item, inner) for inner in keys]
    container, key = draw.choice(places)
    others = [None, True, -1, 0, 1, 2**31, 2**62, 2**64, 1.5, "", "w", "float64", "int64", [], {}, [0], [2**40, 2**40]]
    kind = draw.randrange(4)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, list):
        container.append(copy.deepcopy(container[key]))
    elif kind == 2:
        other, name = draw.choice(places)
        container[key] = copy.deepcopy(other.get(name)) if isinstance(other, dict) else None
    else:
        container[key] = draw.choice(others)


def test_chunks_that_overlap_or_are_outside_are_refused(folder):
    pickled, document = parts(folder)
    chunks = document["tensors"]["w"]["chunks"]
    chunks[1]["offsets"] = [1, 0]
    write_metadata(folder, pickled, document)
    with pytest.raises(CheckpointError, match=r"w: chunks of f32\[5,7\] overlap"):
        load(folder, BARE, mesh=MESH)
    chunks[1]["offsets"] = [4, 0]
    write_metadata(folder, pickled, document)
    with pytest.raises(CheckpointError, match=r"a chunk of 'w' f32\[5,7\] is outside of it"):
        load(folder, BARE, mesh=MESH)


def test_sizes_that_no_file_could_fill_are_refused(folder):
    pickled, document = parts(folder)
    document["tensors"]["b"]["shape"] = document["tensors"]["b"]["chunks"][0]["sizes"] = [2**50]
    write_metadata(folder, pickled, document)
    with pytest.raises(CheckpointError, match=r"a chunk of 'b' i64\[\d+\] of sizes \(\d+,\) has \d+ bytes only"):
        load(folder, BARE, mesh=MESH)


# earlier versions, and torch


def test_what_an_earlier_version_saved_loads_and_is_replaced(folder):
    whole, old = folder.parent, folder.parent / "data-0a1b2c3d4e5f"
    pickled, document = parts(whole)
    for part in (
        *document["tensors"]["w"]["chunks"],
        *document["tensors"]["b"]["chunks"],
        *document["values"].values(),
    ):
        part["file"] = f"{old.name}/{os.path.basename(part['file'])}"
    (folder / ".metadata").unlink()
    folder.rename(old)
    write_metadata(whole, pickled, document)
    assert exists(whole) and [whole] == saved(whole)
    assert is_right(load(whole, BARE, mesh=MESH))
    save(TREE, whole)
    assert 1 == len(saved(whole)) and not old.exists()
    assert is_right(load(whole, BARE, mesh=MESH))


def test_what_torch_has_saved_last_is_the_newest(folder):
    with pytest.warns(UserWarning, match="torch.distributed is disabled|overwriting"):
        dcp.save({"step": 4}, checkpoint_id=folder.parent)
    assert {"step": 4} == load(folder.parent, {"step": 0})
    save({"step": 5}, folder.parent)
    assert {"step": 5} == load(folder.parent, {"step": 0})


def test_what_an_earlier_version_saved_without_a_manifest_loads(folder):
    pickled, _ = parts(folder)
    write_metadata(folder, pickled)
    assert is_right(load(folder, BARE, mesh=MESH))
    path = data_file(folder)
    path.write_bytes(flipped(path.read_bytes(), 8 * 500))
    with pytest.raises(CheckpointError, match="are not those that were written"):
        load(folder, BARE, mesh=MESH)


def test_every_protocol_of_pickles_is_read(torchs):
    metadata = pickle.loads((torchs / ".metadata").read_bytes())
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        write_metadata(torchs, pickle.dumps(metadata, protocol))
        assert is_right(load(torchs, BARE, mesh=MESH))


def test_data_that_torch_has_transformed_is_refused(torchs):
    metadata = pickle.loads((torchs / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = _StorageInfo(info.relative_path, info.offset, info.length, ["stream.zstd"])
    write_metadata(torchs, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="its data is compressed or otherwise transformed"):
        load(torchs, BARE, mesh=MESH)
