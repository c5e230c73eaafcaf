"""`.metadata`: DCP's pickle, followed by the same as JSON with a checksum, the manifest.

Readers of pickles stop where the pickle ends, so torch's tools see an ordinary checkpoint of DCP. Here only the
manifest is read, and never the pickle in front of it. A file without a manifest was written by torch, or by an earlier
version of `spmd`; for it, see `spmd.checkpoint.records`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import attrs
from torch.distributed.checkpoint.metadata import Metadata

from spmd.checkpoint.contents import Contents, Document, describe, parse
from spmd.checkpoint.records import read_records
from spmd.core.documents import parse as parse_json
from spmd.errors import CheckpointError

_FOOTER = re.compile(rb"\nspmd manifest 1, bytes ([0-9]{16}), sha256 ([0-9a-f]{64})\n\Z")
_DIGEST = 64 + 1  # hexadecimal digits and newline at the end; the digest covers all before
_LONGEST = 200


@attrs.frozen
class Manifest:
    """What a checkpoint holds, and a digest that identifies the save."""

    contents: Contents
    digest: str


def append_manifest(path: Path, metadata: Metadata) -> None:
    """Append the manifest to the pickle that DCP has written to `path`."""
    text = json.dumps(describe(metadata), separators=(",", ":")).encode()
    with path.open("r+b") as file:
        added = text + f"\nspmd manifest 1, bytes {len(text):016}, sha256 ".encode()
        digest = hashlib.sha256(file.read() + added).hexdigest()
        file.write(added + digest.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def has_manifest(path: Path) -> bool:
    """Whether a `.metadata` ends as those do that `append_manifest` has completed."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _LONGEST, 0))
        return _FOOTER.search(file.read()) is not None


def read_manifest(data: bytes) -> Manifest:
    """The manifest in the bytes of a `.metadata`; without one, the same from the pickle.

    Raises:
        CheckpointError: the file is damaged or malformed, or its pickle names anything that DCP's metadata does not.
    """
    footer = _FOOTER.search(data, max(len(data) - _LONGEST, 0))
    if footer is None:
        return Manifest(parse(read_records(data)), hashlib.sha256(data).hexdigest())
    digest = hashlib.sha256(data[:-_DIGEST]).hexdigest()
    if footer[2] != digest.encode():
        raise CheckpointError("its bytes are not those that were written")
    contents = parse(_document(data[footer.start() - int(footer[1]) : footer.start()]))
    if any(part.crc32 is None for part in contents.parts):
        raise CheckpointError("a checksum is missing")
    return Manifest(contents, digest)


def _document(text: bytes) -> Document:
    try:
        return parse_json(text.decode())  # type: ignore[no-any-return]
    except ValueError as error:
        raise CheckpointError(f"its manifest is no JSON: {error}") from error
