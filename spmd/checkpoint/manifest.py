"""`.metadata`: the pickle that torch's tools read, then the same as JSON with a checksum, which is what is read here.

Readers of pickles stop where the pickle ends, and see an ordinary checkpoint of DCP's. The JSON is never a pickle's
word for something else: of a file with a manifest the pickle is not looked at. A file without one was written by torch,
or by an earlier version; see `spmd.checkpoint.records`.
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
_DIGEST = 64 + 1  # at the end of the footer, which it covers up to itself
_LONGEST = 200


@attrs.frozen
class Manifest:
    """What a checkpoint holds, and what tells it from all others."""

    contents: Contents
    digest: str


def append_manifest(path: Path, metadata: Metadata) -> None:
    """Add the manifest to the pickle that DCP has written."""
    text = json.dumps(describe(metadata), separators=(",", ":")).encode()
    with path.open("r+b") as file:
        added = text + f"\nspmd manifest 1, bytes {len(text):016}, sha256 ".encode()
        digest = hashlib.sha256(file.read() + added).hexdigest()
        file.write(added + digest.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(data: bytes) -> Manifest:
    """What a `.metadata` says.

    Raises:
        CheckpointError: it is damaged, describes nothing that can be read, or names what no checkpoint needs.
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
