"""Checkpoints of pytrees: written by every rank, read back by any mesh.

    spmd.checkpoint.save({"state": state, "step": 100}, "run/checkpoint")
    restored = spmd.checkpoint.load("run/checkpoint", {"state": specs, "step": 0}, mesh=other_mesh)

torch.distributed.checkpoint (DCP) writes and reads, so the folder is one of DCP's: torch's own tools read it, and
folders that they wrote can be loaded here. Every value is stored once, by one of the ranks that hold it; a reader takes
the parts that its own layout wants. Overwriting a checkpoint is atomic: a save that is killed at any point leaves the
last one.
"""

from spmd.checkpoint.folder import exists
from spmd.checkpoint.loading import load
from spmd.checkpoint.saving import Saving, save, save_async

__all__ = ["Saving", "exists", "load", "save", "save_async"]
