"""Settings in a ChainMap, of which the upper layer changes once, and an enum."""

import collections
import enum

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)


class Mode(enum.Enum):
    """Whether to train."""

    TRAIN = "train"
    EVAL = "eval"


user, defaults, mode, results = {}, {"scale": 2.0, "shift": 1.0}, Mode.TRAIN, []
settings = collections.ChainMap(user, defaults)


@spmd.jit(P("data"), mesh=mesh)
def shifted(x):
    return x * settings["scale"] + settings["shift"] * (mode is Mode.TRAIN)


for step in range(24):
    results.append(shifted(torch.randn(10)))
    if step == 8:
        user["shift"] = 5.0
    if step == 16:
        mode = Mode.EVAL
