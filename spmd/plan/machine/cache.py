"""Measured machines in files of the user's cache folder: `$SPMD_CACHE_DIR`, `$XDG_CACHE_HOME/spmd` or `~/.cache/spmd`.

A file that cannot be read, or is for something else, is as good as none; one that cannot be written is not written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from spmd.core.documents import parse
from spmd.errors import PlanError
from spmd.plan.machine.machine import Machine


def folder() -> Path:
    """The folder of the files."""
    if given := os.environ.get("SPMD_CACHE_DIR"):
        return Path(given) / "machines"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "spmd" / "machines"


def load_machine(about: Mapping[str, Any]) -> Machine | None:
    """The machine that was saved for `about`, which says in plain data what its constants depend on; None if none."""
    try:
        document = parse(_path(about).read_text(encoding="utf-8"))
        return Machine(**document["machine"]) if document["about"] == about else None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, PlanError):
        return None


def save_machine(about: Mapping[str, Any], machine: Machine) -> None:
    """Save a machine; other processes see the whole file or none."""
    text = json.dumps({"about": about, "machine": attrs.asdict(machine)}, indent=1)
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
        path = _path(about)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)


def _path(about: Mapping[str, Any]) -> Path:
    return folder() / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}.json"
