"""A JAX-style SPMD library over PyTorch: turns a function for one device into the program that each rank runs."""

import importlib
from typing import TYPE_CHECKING, Any

from spmd import collectives, optim
from spmd.api.compile_log import log_compiles
from spmd.api.control_flow.associative_scan import associative_scan
from spmd.api.control_flow.cond import cond
from spmd.api.control_flow.fori_loop import fori_loop
from spmd.api.control_flow.map import map
from spmd.api.control_flow.scan import scan
from spmd.api.control_flow.stack_layers import stack_layers
from spmd.api.control_flow.switch import switch
from spmd.api.control_flow.while_loop import while_loop
from spmd.api.eager.dispatch import implicit_replication
from spmd.api.jit import jit
from spmd.api.materialize import materialize
from spmd.api.model_specs.by_path import specs
from spmd.api.model_specs.fully_sharded import fsdp_specs
from spmd.api.shard_map import shard_map
from spmd.api.values.communication import comms_of
from spmd.api.values.distribute import distribute, from_process_data
from spmd.api.values.distribute_module import distribute_module
from spmd.api.values.dtensor import DTensor
from spmd.api.values.factories import (
    arange,
    empty,
    empty_like,
    full,
    full_like,
    ones,
    ones_like,
    rand,
    rand_like,
    randn,
    randn_like,
    zeros,
    zeros_like,
)
from spmd.api.values.full_tree import full_tree
from spmd.api.values.visualize import visualize
from spmd.collectives.callbacks import pure_callback
from spmd.core.compile_lock import COMPILING
from spmd.core.mesh import Mesh, make_mesh, use_mesh
from spmd.core.placement import Partial, Replicate, Shard
from spmd.core.spec import FREE, DTensorSpec, P, PartitionSpec, TensorMeta
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
from spmd.job.launch import launch
from spmd.job.process import init, is_distributed, process_count, process_index
from spmd.tracing.constrain import constrain, reshard
from spmd.tracing.disable_jit import disable_jit

if TYPE_CHECKING:
    from spmd import checkpoint, debug, random, rules
    from spmd.api.model_specs.tensor_parallel import tensor_parallel_specs
    from spmd.api.values.interop import from_torch_dtensor, to_torch_dtensor
    from spmd.checkpoint.safetensors_loading import load_safetensors
    from spmd.checkpoint.safetensors_saving import save_safetensors
    from spmd.plan.machine.machine import Machine

__version__ = "0.2.0"

__all__ = [
    "FREE",
    "CheckpointError",
    "DTensor",
    "DTensorSpec",
    "DivergenceError",
    "Machine",
    "Mesh",
    "MeshError",
    "P",
    "Partial",
    "PartitionSpec",
    "PlanError",
    "Replicate",
    "RuleError",
    "Shard",
    "ShardingError",
    "SpmdError",
    "TensorMeta",
    "TraceError",
    "arange",
    "associative_scan",
    "checkpoint",
    "collectives",
    "comms_of",
    "cond",
    "constrain",
    "debug",
    "disable_jit",
    "distribute",
    "distribute_module",
    "empty",
    "empty_like",
    "fori_loop",
    "from_process_data",
    "from_torch_dtensor",
    "fsdp_specs",
    "full",
    "full_like",
    "full_tree",
    "implicit_replication",
    "init",
    "is_distributed",
    "jit",
    "launch",
    "load_safetensors",
    "log_compiles",
    "make_mesh",
    "map",
    "materialize",
    "ones",
    "ones_like",
    "optim",
    "process_count",
    "process_index",
    "pure_callback",
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "random",
    "reshard",
    "rules",
    "save_safetensors",
    "scan",
    "shard_map",
    "specs",
    "stack_layers",
    "switch",
    "tensor_parallel_specs",
    "to_torch_dtensor",
    "use_mesh",
    "visualize",
    "while_loop",
    "zeros",
    "zeros_like",
]


_SUBMODULES = ("checkpoint", "debug", "inspect", "plan", "random", "rules")
_HOMES = {
    "Machine": "spmd.plan.machine.machine",
    "from_torch_dtensor": "spmd.api.values.interop",
    "load_safetensors": "spmd.checkpoint.safetensors_loading",
    "save_safetensors": "spmd.checkpoint.safetensors_saving",
    "tensor_parallel_specs": "spmd.api.model_specs.tensor_parallel",
    "to_torch_dtensor": "spmd.api.values.interop",
}
"""What `import spmd` leaves out: the first plan imports the planner, the rules and the lowering, which are half of the
package, and torch.distributed.checkpoint takes half a second."""


def __getattr__(name: str) -> Any:
    """Import what `import spmd` leaves out, at its first use."""
    if name in _SUBMODULES or name in _HOMES:
        with COMPILING:
            module = importlib.import_module(_HOMES.get(name, f"spmd.{name}"))
        return getattr(module, name) if name in _HOMES else module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without submodules that happen to be imported."""
    return __all__
