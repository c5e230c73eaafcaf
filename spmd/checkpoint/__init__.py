"""Checkpoints of pytrees: all ranks write them, and any mesh can read them.

    spmd.checkpoint.save({"state": state, "step": 100}, "run/checkpoint")
    restored = spmd.checkpoint.load("run/checkpoint", {"state": specs, "step": 0}, mesh=other_mesh)

torch.distributed.checkpoint (DCP) writes and reads the files, so torch's own tools can read a checkpoint, and those
that they wrote can be loaded here. Every value is stored once, by one of the ranks that hold it; a rank reads only the
parts that its sharding needs. Overwriting a checkpoint is atomic: a killed save leaves one complete checkpoint. A
folder may hold several, the last ones and named ones; a load takes the newest that is not damaged.
"""

from spmd.checkpoint.folder import exists, saved
from spmd.checkpoint.loading import load
from spmd.checkpoint.position import Position
from spmd.checkpoint.saving import Saving, save, save_async

__all__ = ["Position", "Saving", "exists", "load", "save", "save_async", "saved"]
