"""A JAX-style SPMD library over PyTorch: a function for one device becomes the program that each rank runs."""

from spmd import collectives, optim, rules
from spmd.constrain import constrain, reshard
from spmd.dtensor import DTensor, distribute
from spmd.errors import DivergenceError, MeshError, PlanError, RuleError, ShardingError, SpmdError, TraceError
from spmd.jit import jit
from spmd.mesh import Mesh, make_mesh, use_mesh
from spmd.placement import Partial, Replicate, Shard
from spmd.plan import Machine
from spmd.spec import DTensorSpec, P, TensorMeta

__version__ = "0.1.0"

__all__ = [
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
    "collectives",
    "constrain",
    "distribute",
    "jit",
    "make_mesh",
    "optim",
    "reshard",
    "rules",
    "use_mesh",
]
