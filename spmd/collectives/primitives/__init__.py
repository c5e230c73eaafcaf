"""The collective primitives: torch operators in namespace `spmd`, each with the rules that transforms need.

All sizes that a primitive depends on are arguments, so the shape of its result follows from them, and tracing needs no
mesh. A runtime runs the primitives; a call outside of one is an error. Several axes act as one, the first one major.
Shards of a dim are the nested chunks of `spmd.core.spec.chunk_bounds`, possibly uneven or empty.

Differentiation follows JAX's `shard_map`: along each mesh axis a value has a type (`spmd.collectives.axis_types`). The
cotangent of an invariant or a varying value is of the same type, that of an unreduced value is reduced, and that of a
reduced one unreduced. Each primitive states its types and its transpose.

| primitive                | operand   | result    | transpose                   |
|--------------------------|-----------|-----------|-----------------------------|
| all_reduce (sum)         | varying   | invariant | pcast to varying            |
| pcast to varying         | invariant | varying   | all_reduce                  |
| all_gather               | varying   | varying   | reduce_scatter              |
| all_gather_invariant     | varying   | invariant | shard                       |
| all_gather_reduced       | varying   | reduced   | reduce_scatter_unreduced    |
| reduce_scatter (sum)     | varying   | varying   | all_gather                  |
| reduce_scatter_unreduced | unreduced | varying   | all_gather_reduced          |
| all_reduce_unreduced     | unreduced | invariant | pcast to reduced            |
| pcast to reduced         | invariant | reduced   | all_reduce_unreduced        |
| pcast to unreduced       | varying   | unreduced | pcast of reduced to varying |
| pcast to varying         | reduced   | varying   | pcast to unreduced          |
| all_to_all               | varying   | varying   | all_to_all                  |
| permute                  | varying   | varying   | permute                     |
| ragged_all_to_all        | varying   | varying   | ragged_all_to_all           |
| shard                    | invariant | varying   | all_gather_invariant        |
| to_partial               | varying   | unreduced | to_partial                  |
| to_partial               | reduced   | varying   | to_partial                  |

The gradient of an all_reduce by max or min is divided equally among the elements that equal the result.
"""

from spmd.collectives.primitives.all_gather import ALL_GATHER, ALL_GATHER_INVARIANT, ALL_GATHER_REDUCED
from spmd.collectives.primitives.all_reduce import ALL_REDUCE, ALL_REDUCE_UNREDUCED
from spmd.collectives.primitives.all_to_all import ALL_TO_ALL
from spmd.collectives.primitives.permute import PERMUTE
from spmd.collectives.primitives.ragged_all_to_all import RAGGED_ALL_TO_ALL
from spmd.collectives.primitives.reduce_scatter import REDUCE_SCATTER, REDUCE_SCATTER_UNREDUCED
from spmd.collectives.primitives.table import BY_OPERATOR, COLLECTIVES, KINDS, PRIMITIVES, UNTYPED
from spmd.collectives.primitives.without_communication import PCAST, SHARD, TO_PARTIAL

__all__ = [
    "ALL_GATHER",
    "ALL_GATHER_INVARIANT",
    "ALL_GATHER_REDUCED",
    "ALL_REDUCE",
    "ALL_REDUCE_UNREDUCED",
    "ALL_TO_ALL",
    "BY_OPERATOR",
    "COLLECTIVES",
    "KINDS",
    "PCAST",
    "PERMUTE",
    "PRIMITIVES",
    "RAGGED_ALL_TO_ALL",
    "REDUCE_SCATTER",
    "REDUCE_SCATTER_UNREDUCED",
    "SHARD",
    "TO_PARTIAL",
    "UNTYPED",
]
