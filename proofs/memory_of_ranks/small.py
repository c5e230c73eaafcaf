"""Small programs of the proof: training steps of MLPs, and what makes each kind of collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import spmd
from proofs.memory_of_ranks.program import Case, Program, adamw_spec, case, empty
from spmd import P
from spmd.collectives import all_gather, all_to_all, axis_size, ppermute, psum_scatter
from spmd.optim import MasterWeightsState, Optimizer, adamw, clip_by_global_norm, master_weights, sgd

AXIS = "x"
ROWS, COLUMNS, WHOLE = P(AXIS), P(None, AXIS), P()


def line(ranks: int) -> spmd.Mesh:
    """A mesh of one axis."""
    return spmd.make_mesh({AXIS: ranks})


def size(even: bool, numel: int = 256) -> int:
    """A length that 2 and 4 divide, or a slightly smaller one that they do not; that of a kernel stays."""
    return numel if even or numel % 2 else numel - 3


def mlp_loss(layers: Any, x: Tensor, target: Tensor) -> Tensor:
    """The mean squared error of an MLP; its last layer is linear."""
    *hidden, last = layers
    for weight in hidden:
        x = torch.relu(x @ weight)
    return (x @ last - target).float().square().mean()


def mlp_step(
    depth: int,
    widths: tuple[int, int],
    weights: P,
    *,
    optimizer: Optimizer | None = None,
    state: P | None = None,
    batch: P = ROWS,
    rows: int = 128,
    dtype: torch.dtype = torch.float32,
    donate: bool = True,
) -> Program:
    """A training step of an MLP.

    Args:
        depth: the number of pairs of layers, up and down.
        widths: outside and inside of a pair.
        weights: the spec of weights.
        optimizer: SGD by default, without state.
        state: the spec of AdamW's moments; that of weights by default.
        batch: the spec of the batch.
        rows: of the batch.
        dtype: of weights and activations.
        donate: whether the step may free its state.
    """

    def make(ranks: int, even: bool) -> Case:
        narrow, wide = (size(even, width) for width in widths)
        layers = [empty(*shape, dtype=dtype) for _ in range(depth) for shape in ((narrow, wide), (wide, narrow))]
        moments = weights if state is None else state
        spec: Any = WHOLE if optimizer is None else adamw_spec(moments)
        if dtype != torch.float32:
            spec = MasterWeightsState(moments, spec)
        rule = sgd(lr=1e-2) if optimizer is None else optimizer

        def step(layers: Any, state: Any, x: Tensor, target: Tensor) -> Any:
            gradients, loss = torch.func.grad_and_value(mlp_loss)(layers, x, target)
            return *rule.step(layers, state, gradients), loss

        x = empty(size(even, rows), narrow, dtype=dtype)
        specs = (weights, spec, batch, batch)
        options = {"donate_argnums": (0, 1)} if donate else {}
        return case(step, specs, (weights, spec, P()), line(ranks), (layers, rule.init(layers), x, x), **options)

    return make


def function(
    body: Callable[..., Any], specs: tuple[P, ...], out: Any, *shapes: tuple[int, ...], dtype: torch.dtype | None = None
) -> Program:
    """A function of tensors of these shapes, each of whose lengths is a little smaller where shards are uneven."""

    def make(ranks: int, even: bool) -> Case:
        sizes = [tuple(size(even, length) for length in shape) for shape in shapes]
        like = [empty(*found, dtype=dtype or torch.float32) for found in sizes]
        return case(body, specs, out, line(ranks), like)

    return make


def by_shard_map(
    body: Callable[..., Any], specs: tuple[P, ...], out: P, shapes: Callable[[int], tuple[tuple[int, ...], ...]]
) -> Program:
    """A function of per-rank values, in shapes that have a length that is 256 or odd."""

    def make(ranks: int, even: bool) -> Case:
        mesh = line(ranks)
        like = [empty(*shape) for shape in shapes(size(even))]
        return case(spmd.shard_map(body, mesh, specs, out), specs, out, mesh, like)

    return make


def transposes(x: Tensor) -> Tensor:
    """Softmax along one dim after the other: each has an all_to_all before it if both are sharded in turn."""
    for dim in (0, 1, 0):
        x = spmd.constrain(x.softmax(dim).exp(), COLUMNS if dim == 1 else ROWS)
    return x


def contracts(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Products over a sharded dim, whose partial sums are scattered."""
    return torch.tanh(spmd.constrain(x @ w, ROWS)) @ v


def gathers(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Many results that every rank holds as a whole."""
    return tuple(x.sin() for x in tensors)


def sums(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Many partial sums that every rank needs."""
    return tuple(spmd.constrain(x.t() @ x, WHOLE).cos() for x in tensors)


def reduces(x: Tensor) -> tuple[Tensor, ...]:
    """Reductions of a sharded dim, by sum, max and logsumexp."""
    centred = x - x.mean(0)
    return centred.square().sum(0).sqrt(), x.amax(0), x.logsumexp(0), (centred / x.std()).var()


def classifies(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a cross-entropy over a sharded vocabulary."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        logits = x @ w
        return F.cross_entropy(logits, torch.arange(len(x)) % w.shape[1])

    return torch.func.grad(loss, (0, 1))(x, w)  # type: ignore[no-any-return]


def normalizes(x: Tensor, w: Tensor) -> Tensor:
    """Norms, softmax and dropout."""
    y = F.layer_norm(x @ w, (w.shape[1],))
    return F.dropout(y.softmax(-1), 0.5) @ w.t()


def scans(x: Tensor) -> Tensor:
    """Along the sharded dim: a running sum, a sort and the largest."""
    return x.cumsum(0).sort(0).values + x.topk(1, dim=0).values


def convolves(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The gradients of two convolutions."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv1d(F.gelu(F.conv1d(x, w, padding=1)), w, padding=1)
        return y.square().mean()

    return torch.func.grad(loss, (0, 1))(x, w)  # type: ignore[no-any-return]


def embeds(table: Tensor, x: Tensor) -> Tensor:
    """The gradient of an embedding whose table is sharded."""
    tokens = torch.arange(512).view(8, 64) % table.shape[0]
    return torch.func.grad(lambda table: (F.embedding(tokens, table) @ x).square().mean())(table)  # type: ignore[no-any-return]


def counts(x: Tensor) -> tuple[Tensor, ...]:
    """Sums of int16, which are sent in a wider dtype, and a gathered bool."""
    return x.sum(0, dtype=torch.int16), spmd.constrain(x > 0, WHOLE).logical_not(), x.amax(0)


def initializes(x: Tensor) -> list[Tensor]:
    """Random tensors of which each rank keeps its shard."""
    return [torch.randn(256, 256) * 0.02 for _ in range(6)] + [x + 1]


def keeps_parts(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Results that are parts of larger tensors: of a product, of a gathered tensor, of a copy."""
    whole = spmd.constrain((x @ w).exp(), WHOLE)
    return whole[:32], (x @ w).t().reshape(-1)[8:], torch.tanh(x)[:, :64]


def recurs(h: Tensor, g: Tensor, xs: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a loop that carries sums, and keeps one of them, of which two are sent as one."""

    def body(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], None]:
        h, g = (spmd.constrain(x.t() @ spmd.constrain(x @ each, ROWS).tanh(), WHOLE) for each in carry)
        return (h, g.sin()), None

    def loss(h: Tensor, g: Tensor) -> Tensor:
        h, g = spmd.scan(body, (h, g), xs)[0]
        return (h.square() * g).sum()

    return torch.func.grad(loss, (0, 1))(h, g)  # type: ignore[no-any-return]


def scatters(x: Tensor, w: Tensor) -> Tensor:
    """Per rank: partial products, summed and scattered, gathered again, and scattered."""
    y = torch.relu(psum_scatter(x @ w, AXIS, tiled=True))
    return psum_scatter(all_gather(y, AXIS, tiled=True) * 2, AXIS, tiled=True)


def exchanges(x: Tensor) -> Tensor:
    """Per rank: columns for rows and back."""
    y = all_to_all(x, AXIS, 1, 0, tiled=True)
    return all_to_all(y.softmax(0), AXIS, 0, 1, tiled=True)


def circles(x: Tensor) -> Tensor:
    """Per rank: blocks that go round once."""
    ranks, total = axis_size(AXIS), x
    for _ in range(ranks - 1):
        x = ppermute(x, AXIS, [(rank, (rank + 1) % ranks) for rank in range(ranks)])
        total = total + x.tanh()
    return total


DEEP, WIDE = (6, (128, 256)), (1, (128, 1024))
ADAM = adamw(lr=1e-3)
SQUARE = (256, 256)

SMALL: Mapping[str, Program] = {
    "mlp deep fsdp dim 0, adamw": mlp_step(*DEEP, ROWS, optimizer=ADAM),
    "mlp deep fsdp dim 0, adamw, state kept": mlp_step(*DEEP, ROWS, optimizer=ADAM, donate=False),
    "mlp deep fsdp dim 1, adamw": mlp_step(*DEEP, COLUMNS, optimizer=ADAM),
    "mlp deep fsdp dim 0, sgd": mlp_step(*DEEP, ROWS),
    "mlp deep fsdp, long batch": mlp_step(*DEEP, ROWS, rows=2048),
    "mlp deep fsdp, few rows": mlp_step(*DEEP, ROWS, rows=8),
    "mlp deep fsdp, clipped": mlp_step(*DEEP, ROWS, optimizer=clip_by_global_norm(1.0, ADAM)),
    "mlp deep fsdp, bfloat16": mlp_step(*DEEP, ROWS, optimizer=master_weights(ADAM), dtype=torch.bfloat16),
    "mlp deep zero-1, adamw": mlp_step(*DEEP, WHOLE, optimizer=ADAM, state=ROWS),
    "mlp deep dp, adamw": mlp_step(*DEEP, WHOLE, optimizer=ADAM),
    "mlp wide fsdp dim 0, sgd": mlp_step(*WIDE, ROWS),
    "mlp wide fsdp dim 1, adamw": mlp_step(*WIDE, COLUMNS, optimizer=ADAM),
    "mlp wide dp, sgd, state kept": mlp_step(*WIDE, WHOLE, donate=False),
    "mlp wide tp, adamw": mlp_step(*WIDE, COLUMNS, optimizer=ADAM, batch=WHOLE),
    "transposes": function(transposes, (ROWS,), ROWS, SQUARE),
    "contracts": function(contracts, (COLUMNS, ROWS, WHOLE), ROWS, SQUARE, SQUARE, SQUARE),
    "gathers": function(gathers, (ROWS,) * 6, WHOLE, *[SQUARE] * 6),
    "gathers dim 1": function(gathers, (COLUMNS,) * 6, WHOLE, *[SQUARE] * 6),
    "sums": function(sums, (ROWS,) * 4, WHOLE, *[SQUARE] * 4),
    "reduces": function(reduces, (ROWS,), WHOLE, (1024, 64)),
    "classifies": function(classifies, (WHOLE, COLUMNS), (WHOLE, COLUMNS), (128, 64), (64, 1024)),
    "normalizes": function(normalizes, (ROWS, ROWS), ROWS, SQUARE, SQUARE),
    "recurs": function(recurs, (WHOLE, WHOLE, P(None, AXIS)), WHOLE, (64, 64), (64, 64), (5, 256, 64)),
    "scans": function(scans, (ROWS,), ROWS, SQUARE),
    "convolves": function(convolves, (ROWS, WHOLE), (ROWS, WHOLE), (32, 16, 64), (16, 16, 3)),
    "embeds": function(embeds, (ROWS, WHOLE), ROWS, (1024, 64), (64, 64)),
    "counts": function(counts, (ROWS,), WHOLE, (512, 256), dtype=torch.int16),
    "initializes": function(initializes, (ROWS,), ROWS, SQUARE),
    "keeps parts": function(keeps_parts, (ROWS, WHOLE), None, SQUARE, SQUARE),
    "shard_map scatters": by_shard_map(scatters, (COLUMNS, ROWS), ROWS, lambda n: ((256, 256), (256, n))),
    "shard_map exchanges": by_shard_map(exchanges, (ROWS,), ROWS, lambda n: ((64, 8, n),)),
    "shard_map circles": by_shard_map(circles, (ROWS,), ROWS, lambda n: ((256, n),)),
}
