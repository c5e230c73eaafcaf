"""Marker operators that planning inserts into a program: reshards, changes of atoms, and pinned specs.

Planning splits dims into *atoms*: a dim of size `b * s` becomes atoms of sizes `b` and `s`, which it shards separately.
No marker is ever executed: lowering replaces `redistribute` by collectives and slices, and drops `relabel`.
"""

from __future__ import annotations

import torch

torch.library.define("spmd::redistribute", "(Tensor x) -> Tensor")
torch.library.define("spmd::relabel", "(Tensor x) -> Tensor")
torch.library.define("spmd::pin", "(Tensor x) -> Tensor")
torch.library.define("spmd::free", "(Tensor(a) x) -> Tensor(a)")

REDISTRIBUTE: torch._ops.OpOverload = torch.ops.spmd.redistribute.default
"""`redistribute(x)`: a reshard: the same global tensor, with the plan's spec of the result instead of that of `x`."""

RELABEL: torch._ops.OpOverload = torch.ops.spmd.relabel.default
"""`relabel(x)`: the same local tensor, its dims split into other atoms; no communication and no computation."""

PIN: torch._ops.OpOverload = torch.ops.spmd.pin.default
"""`pin(x)`: the same global tensor, which must have a given spec here; planning removes it from the finished plan."""

FREE: torch._ops.OpOverload = torch.ops.spmd.free.default
"""`free(x)`: the same global tensor as a result without a given spec: it has any that a `P` expresses, with no pending
reduction. Planning replaces it in the finished plan."""

MARKERS = (REDISTRIBUTE, RELABEL)
"""The markers of finished plans."""

DRAFT_MARKERS = (*MARKERS, PIN)
"""The markers of plans that are being made, without `FREE`, which stands at results only."""
