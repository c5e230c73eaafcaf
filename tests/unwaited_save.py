"""A rank of a job that saves in the background, and ends without waiting; one rank's disk is full.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 python tests/unwaited_save.py CHECKPOINT FULL_ON STATUS
"""

from __future__ import annotations

import resource
import sys

import torch

import spmd
from spmd import P


def save_unwaited(folder: str, full_on: int) -> None:
    """Save more than fits on the disk of rank `full_on`, in the background."""
    mesh = spmd.make_mesh({"data": spmd.process_count()}, runtime="distributed")
    x = spmd.distribute(torch.ones(4, 50_000), P("data"), mesh)
    if spmd.process_index() == full_on:  # a limit stands for the disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    spmd.checkpoint.save_async({"x": x}, folder)


def save_alone(folder: str) -> None:
    """As `save_unwaited` in a process that is no rank of a job."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    spmd.checkpoint.save_async({"x": torch.ones(4, 50_000)}, folder)


if __name__ == "__main__":
    folder, full_on, status = sys.argv[1:]
    spmd.init(timeout=240)
    save_unwaited(folder, int(full_on))
    print("the end of the script")
    sys.exit(int(status))
