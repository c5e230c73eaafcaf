"""A JAX-style SPMD library over PyTorch: a function for one device becomes the program that each rank runs."""

import importlib
from typing import TYPE_CHECKING, Any

from spmd import collectives, optim, rules
from spmd.constrain import constrain, reshard
from spmd.distribute import distribute, from_process_data
from spmd.dtensor import DTensor
from spmd.errors import (
    CheckpointError,
    DivergenceError,
    MeshError,
    PlanError,
    RuleError,
    ShardingError,
    SpmdError,
    TraceError,
)
from spmd.interop import from_torch_dtensor, to_torch_dtensor
from spmd.jit import jit
from spmd.launch import launch
from spmd.mesh import Mesh, make_mesh, use_mesh
from spmd.placement import Partial, Replicate, Shard
from spmd.plan import Machine
from spmd.process import init, is_distributed, process_count, process_index
from spmd.spec import DTensorSpec, P, TensorMeta

if TYPE_CHECKING:
    from spmd import checkpoint

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "DTensor",
    "DTensorSpec",
    "DivergenceError",
    "Machine",
    "Mesh",
    "MeshError",
    "P",
    "Partial",
    "PlanError",
    "Replicate",
    "RuleError",
    "Shard",
    "ShardingError",
    "SpmdError",
    "TensorMeta",
    "TraceError",
    "checkpoint",
    "collectives",
    "constrain",
    "distribute",
    "from_process_data",
    "from_torch_dtensor",
    "init",
    "is_distributed",
    "jit",
    "launch",
    "make_mesh",
    "optim",
    "process_count",
    "process_index",
    "reshard",
    "rules",
    "to_torch_dtensor",
    "use_mesh",
]


def __getattr__(name: str) -> Any:
    """Import `spmd.checkpoint` at its first use: with torch.distributed.checkpoint it takes more than half a second."""
    if name == "checkpoint":
        return importlib.import_module("spmd.checkpoint")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
