"""Ring attention: exact attention over a sequence that is sharded, with `shard_map`, on virtual ranks or by torchrun.

Each rank keeps its queries, and the blocks of keys and values go round. The parts of the result are joined by their
logsumexp. The backward pass lets the blocks go round again, so that a rank keeps nothing between the passes but its own
shards: queries, keys, values, result and logsumexp.

python examples/ring_attention.py
torchrun --nproc-per-node 4 examples/ring_attention.py

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

import report
import spmd
from spmd import P
from spmd.collectives import axis_index, axis_size, ppermute

SEQUENCE = P(None, None, "seq")
"""The spec of queries, keys and values `[batch, heads, length, features]`."""

TOLERANCE = 1e-4
"""How far a gradient may be from one device's, whose rounding is another."""

MASKED = -1e30
"""The score of a key that a query does not see: finite, since a block may have no other keys."""


@attrs.frozen
class Ring:
    """The ranks that hold the blocks of a sequence, and which blocks they send each other.

    Blocks are the chunks of `torch.chunk`; shorter ones are padded, so that all ranks send equal shapes. In step t the
    rank i has the block i - t. Of a causal attention the blocks after the own one are masked out: they are not sent,
    and zeros come in their place.

    Args:
        axis: the mesh axis.
        length: the global length of the sequence.
        block: the length of a full block.
        causal: whether a query sees only keys up to its own position.
    """

    axis: str
    length: int = attrs.field(validator=attrs.validators.ge(1))
    block: int
    causal: bool

    @classmethod
    def of(cls, axis: str, length: int, ranks: int, causal: bool) -> Ring:
        """The ring of a sequence over so many ranks."""
        return cls(axis, length, -(-length // ranks), causal)

    @property
    def ranks(self) -> int:
        """The number of ranks that hold a part of the sequence; the blocks of any others are empty.

        >>> Ring.of("seq", 9, 8, causal=False).ranks
        5
        """
        return -(-self.length // self.block)

    @property
    def steps(self) -> range:
        """The steps after the first, in which a rank sees its own block."""
        return range(1, self.ranks)

    def onward(self, step: int) -> list[tuple[int, int]]:
        """Which rank sends the block that it holds to which, before a step.

        >>> Ring.of("seq", 8, 4, causal=False).onward(2), Ring.of("seq", 8, 4, causal=True).onward(2)
        ([(0, 1), (1, 2), (2, 3), (3, 0)], [(1, 2), (2, 3)])
        """
        if self.causal:
            return [(rank, rank + 1) for rank in range(step - 1, self.ranks - 1)]
        return [(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]

    def home(self, step: int) -> list[tuple[int, int]]:
        """Which rank sends the gradient of the block that it holds in a step to which, the owner of the block.

        >>> Ring.of("seq", 8, 4, causal=False).home(1), Ring.of("seq", 8, 4, causal=True).home(1)
        ([(0, 3), (1, 0), (2, 1), (3, 2)], [(1, 0), (2, 1), (3, 2)])
        """
        first = step if self.causal else 0
        return [(rank, (rank - step) % self.ranks) for rank in range(first, self.ranks)]

    def hidden(self, step: int, device: torch.device, *, keys_first: bool = False) -> Tensor | None:
        """Which scores of a step are masked out, by queries and keys or by keys and queries; None for none.

        The two are computed by different operators: a step that is jitted as a whole would keep what the forward and
        the backward pass both compute.
        """
        if not self.causal and self.length % self.block == 0:
            return None
        rank, inside = axis_index(self.axis), torch.arange(self.block, device=device)
        visitor = (rank - step) % self.ranks
        if self.causal:  # which covers the padding too
            ahead = (visitor - rank) * self.block
            return inside[:, None] > inside - ahead if keys_first else inside + ahead > inside[:, None]
        end = self.length - visitor * self.block
        return (end <= inside)[:, None] if keys_first else inside >= end


def forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to all keys, in float32 or wider.

    Args:
        q, k, v: `[..., block, features]`, this rank's blocks.
        ring: the blocks.

    Returns:
        The result `[..., block, features]`, and the logsumexp of the scores of each query `[..., block]`.
    """
    out, lse = attend(q, k, v, ring.hidden(0, q.device))
    for step in ring.steps:
        k, v = ppermute((k, v), ring.axis, ring.onward(step))
        part, part_lse = attend(q, k, v, ring.hidden(step, q.device))
        joined = torch.logaddexp(lse, part_lse)
        out = out * (lse - joined).exp()[..., None] + part * (part_lse - joined).exp()[..., None]
        lse = joined
    return out, lse


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys, and the logsumexp of the scores of each query."""
    q, k, v = (wide(x) for x in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, MASKED)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RingAttention(torch.autograd.Function):
    """`forward`, whose residuals are this rank's own blocks.

    The gradient of a block's keys and values is a sum over the ranks that have seen it. Each sends its summand to the
    owner in the step in which it computes it. Sums that travel with the block would, in a causal attention, end on one
    rank and go home from there, to ranks that receive other blocks: `ppermute` sends a rank one at a time.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
        return forward(q, k, v, ring)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, ctx.ring = inputs
        ctx.save_for_backward(q, k, v, *output)

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        residual = (g * out).sum(-1) - g_lse
        grads = list(gradients(q, k, v, g, lse, residual, ctx.ring.hidden(0, q.device, keys_first=True)))
        for step in ctx.ring.steps:
            k, v = ppermute((k, v), ctx.ring.axis, ctx.ring.onward(step))
            of_q, of_k, of_v = gradients(q, k, v, g, lse, residual, ctx.ring.hidden(step, q.device, keys_first=True))
            sent = ppermute((of_k.to(k.dtype), of_v.to(v.dtype)), ctx.ring.axis, ctx.ring.home(step))
            grads = [total + part for total, part in zip(grads, (of_q, *sent), strict=True)]
        of_q, of_k, of_v = (grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))
        return of_q, of_k, of_v, None


def gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, residual: Tensor, hidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The summands that one block of keys adds to the gradients of q, k and v.

    Scores are computed again, `[..., keys, queries]`, as the gradients of k and v need them.
    """
    q, k, v, scale = wide(q), wide(k), wide(v), 1 / math.sqrt(q.shape[-1])
    scores = k @ q.mT * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, MASKED)
    weights = (scores - lse[..., None, :]).exp()
    of_scores = weights * (v @ g.mT - residual[..., None, :]) * scale
    return of_scores.mT @ k, of_scores @ q, weights @ g


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: str, *, length: int, causal: bool = False, save: str = "own"
) -> Tensor:
    """Attention over a sequence of which each rank holds a shard; to be called in a `shard_map` body.

    Args:
        q, k, v: `[..., shard, features]`, this rank's shards.
        axis: the mesh axis over which the sequence is sharded.
        length: the global length of the sequence.
        causal: whether a query sees only keys up to its own position.
        save: what the forward pass keeps for the backward pass: this rank's `"own"` blocks, or `"all"` that came by, as
            differentiation of the forward pass does.

    Returns:
        `[..., shard, features]`, this rank's shard of the result.
    """
    ring, held = Ring.of(axis, length, axis_size(axis), causal), q.shape[-2]
    q, k, v = (pad(x, (0, 0, 0, ring.block - held)) if held < ring.block else x for x in (q, k, v))
    out, _ = forward(q, k, v, ring) if save == "all" else RingAttention.apply(q, k, v, ring)
    return out[..., :held, :].to(q.dtype)


def make_attention(
    mesh: spmd.Mesh, length: int, *, causal: bool = False, save: str = "own"
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of global queries, keys and values `[batch, heads, length, features]`, over the mesh axis `seq`."""

    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, "seq", length=length, causal=causal, save=save)

    return spmd.shard_map(body, mesh, SEQUENCE, SEQUENCE, axis_names={"seq"})


def make_step(mesh: spmd.Mesh, length: int, **options: Any) -> Any:
    """The jitted loss and its gradients, of queries, keys and values and a target that are sharded over `seq`."""
    attention = make_attention(mesh, length, **options)

    def step(qkv: tuple[Tensor, ...], target: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        return torch.func.grad_and_value(lambda qkv: distance(attention(*qkv), target))(qkv)

    return spmd.jit(step, ((SEQUENCE,) * 3, SEQUENCE), ((SEQUENCE,) * 3, P()), mesh=mesh)


def on_one_device(qkv: tuple[Tensor, ...], target: Tensor, causal: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    """The loss and its gradients by torch's attention."""

    def loss(qkv: tuple[Tensor, ...]) -> Tensor:
        return distance(scaled_dot_product_attention(*qkv, is_causal=causal), target)

    return torch.func.grad_and_value(loss)(qkv)


def distance(x: Tensor, target: Tensor) -> Tensor:
    """A loss."""
    return (x - target).square().sum()


def bytes_of_step(ring: Ring, nbytes: int) -> int:
    """Bytes that the busiest rank sends in forward and backward passes, for blocks of so many bytes.

    Forward, a rank sends keys and values in each step but the first; backward these, and their gradients. In a causal
    attention the rank before the last still sends in every step, all together send half as much.
    """
    return (2 + 4) * len(ring.steps) * nbytes


def main(arguments: list[str] | None = None) -> int:
    """Run, and compare with one device; the exit status is 1 if numbers differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, default=8, help="ranks of a virtual mesh (8); under torchrun, all processes"
    )
    parser.add_argument("--length", type=int, default=1024, help="length of the sequence (1024)")
    options = parser.parse_args(arguments)
    console = report.make_console()
    ranks = spmd.process_count() if spmd.is_distributed() else options.ranks
    mesh = spmd.make_mesh({"seq": ranks})
    generator = torch.Generator().manual_seed(0)
    *qkv, target = (torch.randn(1, 4, options.length, 32, generator=generator) for _ in range(4))
    console.print(f"{mesh}: attention over {options.length} positions, 4 heads of 32 features")
    worst = max(run(console, mesh, tuple(qkv), target, causal) for causal in (False, True))
    return int(worst > TOLERANCE)


def run(console: Console, mesh: spmd.Mesh, qkv: tuple[Tensor, ...], target: Tensor, causal: bool) -> float:
    """Run one step and print what it sends and holds; the largest difference from one device."""
    length = qkv[0].shape[-2]
    step, saving = (make_step(mesh, length, causal=causal, save=save) for save in ("own", "all"))
    plan, ring = step.plan(qkv, target), Ring.of("seq", length, mesh.axis_size("seq"), causal)
    grads, _ = step(qkv, target)
    expected, _ = on_one_device(qkv, target, causal)
    worst = max((got.full_tensor() - want).abs().max().item() for got, want in zip(grads, expected, strict=True))
    sent = sum(comm.bytes for comm in plan.comms if comm.kind == "permute")
    formula = bytes_of_step(ring, qkv[0][..., : ring.block, :].nbytes)
    console.print(f"\n{'causal' if causal else 'not causal'}: {step.lower(qkv, target).count()}")
    console.print(f"  the busiest rank sends {report.size(sent)} of blocks (closed form: {report.size(formula)})")
    pairs = sum(len(ring.onward(step)) for step in ring.steps)
    console.print(
        f"  the ranks send {pairs} blocks of keys and of values forward, of {ring.ranks * len(ring.steps)} at most"
    )
    console.print(
        f"  at most {report.size(plan.memory.peak)} on a rank; "
        f"{report.size(saving.plan(qkv, target).memory.peak)} if every block that came by were kept"
    )
    console.print(f"  gradients differ from one device's by {worst:.1e} at most")
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
