"""The operators that planning adds to a program: for a spec that is asked for, a change of spec, a change of dims.

None is ever executed. Lowering replaces `redistribute` by collectives and slices, and `relabel` by nothing.
"""

from __future__ import annotations

import torch

torch.library.define("spmd::redistribute", "(Tensor x) -> Tensor")
torch.library.define("spmd::relabel", "(Tensor x) -> Tensor")
torch.library.define("spmd::pin", "(Tensor x) -> Tensor")

REDISTRIBUTE: torch._ops.OpOverload = torch.ops.spmd.redistribute.default
"""`redistribute(x)`: the same global tensor, in the plan's spec of the result instead of that of `x`."""

RELABEL: torch._ops.OpOverload = torch.ops.spmd.relabel.default
"""`relabel(x)`: the same local tensor, its dims read as other atoms; nothing moves and nothing is computed."""

PIN: torch._ops.OpOverload = torch.ops.spmd.pin.default
"""`pin(x)`: the same global tensor, which must have a given spec here. Pins end with planning; no plan holds one."""
