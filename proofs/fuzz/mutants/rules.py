"""Mutants of rules: dims that must not be sharded, required reductions, and local implementations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from proofs.fuzz.mutants.mutant import Mutant, Patch, mutant, of_rule, replaced, returning
from spmd.collectives import all_gather, axis_index
from spmd.core.placement import Reduction
from spmd.ir.call import Call
from spmd.rules.builders import pointwise
from spmd.rules.ops.halo import Halo
from spmd.rules.rule import Factors

_CONVOLUTIONS = "aten.convolution.default aten.convolution_backward.default"
_ROWS = "aten.select.int aten.index.Tensor aten.index_select.default aten.index_put.default aten.scatter_add.default"
_WINDOWS = "aten.slice.Tensor aten.roll.default aten.cat.default aten.constant_pad_nd.default aten.flip.default"
_EXTREMES = "aten.amax.default aten.amin.default aten.max.default aten.min.default"
_SOFTMAX = "aten._softmax.default aten._log_softmax.default"
_NORMS = "aten.native_layer_norm.default aten.native_layer_norm_backward.default aten.native_batch_norm.default"


def _elementwise(call: Call, factors: Factors) -> Factors:
    """Let every dim be sharded, if all tensors have one shape."""
    if len({meta.shape for meta in (*call.operands, *call.results)}) > 1:
        return factors
    return pointwise(lambda _: factors.rows).factorize(call)


def _reduced_by(kind: Reduction) -> Callable[[Call, Factors], Factors]:
    return lambda call, factors: attrs.evolve(factors, reduce=dict.fromkeys(factors.reduce, kind))


def _unreduced(call: Call, factors: Factors) -> Factors:
    """Treat partial results as complete."""
    return attrs.evolve(factors, reduce={}, independent=factors.independent | factors.reduce.keys())


def _without_additive(call: Call, factors: Factors) -> Factors:
    return attrs.evolve(factors, additive=frozenset())


def _free(call: Call, factors: Factors) -> Factors:
    """Let factors be sharded that must be replicated."""
    return attrs.evolve(factors, replicate=frozenset(), independent=factors.independent | factors.replicate)


def _without_bodies(call: Call, factors: Factors) -> Factors:
    """Run the operator itself on the shards, in place of its local implementations."""
    rows = tuple(attrs.evolve(row, body=None) for row in factors.rows)
    return attrs.evolve(factors, bodies={}, rows=rows, independent=factors.independent | factors.bodies.keys())


def _reduce_whole(kind: Reduction) -> Callable[[Call, Factors], Factors]:
    """Treat a factor that must be replicated as a reduction of this kind."""
    return lambda call, factors: attrs.evolve(
        factors, replicate=frozenset(), reduce={**factors.reduce, **dict.fromkeys(factors.replicate, kind)}
    )


def _freely(name: str, ops: str) -> Mutant:
    return of_rule(
        f"sharded: {name}", f"`{ops.split()[0]}` runs on shards of the dim that it works along", ops, _elementwise
    )


def _local(name: str, ops: str) -> Mutant:
    text = f"`{ops.split()[0]}` itself runs on shards, in place of its local body"
    return of_rule(f"body: {name}", text, ops, _without_bodies)


def _silent(name: str, module: str, function: str, within: str) -> Mutant:
    """A local implementation that leaves out one exchange between ranks."""
    text = f"ranks do not exchange what `{function}` combines in {module}.py"
    return mutant(
        f"body: {name}", text, replaced(f"spmd.rules.ops.{module}", function, lambda x, axes: x), within=within
    )


def _always_held(index: Tensor, start: Tensor, length: int) -> tuple[Tensor, Tensor]:
    held = torch.ones_like(index, dtype=torch.bool)
    return index % max(length, 1), held


def _including_own(totals: Tensor, neutral: float, axes: Any) -> Tensor:
    gathered = all_gather(totals, axes)
    rank = torch.arange(gathered.shape[0], device=totals.device).view(-1, *[1] * totals.ndim)
    return torch.where(rank <= axis_index(axes), gathered, torch.full_like(gathered, neutral))


def _shard_first(call: Call, factors: Factors) -> Factors:
    """Let dims of the first operand be sharded that must be replicated."""
    (first, *others), shape = factors.operands, call.operands[0].shape
    added = {f"own{dim}": size for dim, size in enumerate(shape) if not first[dim]}
    whole = tuple(names or (f"own{dim}",) for dim, names in enumerate(first))
    sizes, independent = {**factors.sizes, **added}, factors.independent | added.keys()
    return attrs.evolve(factors, operands=(whole, *others), sizes=sizes, independent=independent)


def _minor_first(found: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    source, target, sizes = found
    return source, tuple(names[::-1] for names in target), sizes


def _local_count(over: Callable[..., Any]) -> Callable[..., Any]:
    def change(call: Call, x: Tensor) -> tuple[Sequence[int], int]:
        dims, _ = over(call, x)
        return dims, math.prod(max(x.shape[dim], 1) for dim in dims)

    return change


MUTANTS = (
    # reductions
    of_rule(
        "reduce: sum as max",
        "sums over a sharded dim are combined by maximum",
        "sum sum.dim_IntList",
        _reduced_by("max"),
    ),
    of_rule("reduce: sum not finished", "sums over a sharded dim pass for whole", "sum sum.dim_IntList", _unreduced),
    of_rule("reduce: amax as sum", "maxima over a sharded dim are added", "amax max", _reduced_by("sum")),
    of_rule("reduce: amin not finished", "minima over a sharded dim pass for whole", "amin min", _unreduced),
    of_rule(
        "reduce: any as min",
        "`any` over a sharded dim is combined by minimum",
        "any any.dim any.dims",
        _reduced_by("min"),
    ),
    of_rule(
        "reduce: all as max",
        "`all` over a sharded dim is combined by maximum",
        "all all.dim all.dims",
        _reduced_by("max"),
    ),
    _local("prod", "prod prod.dim_int"),
    _local("norm alone", "linalg_vector_norm"),
    _silent("norm", "merges", "psum", "aten.linalg_vector_norm.default"),
    mutant(
        "reduce: neutral element",
        "an empty shard takes part in a maximum with 0",
        replaced("spmd.rules.ops.reductions", "neutral_element", lambda op, dtype: 0),
        replaced("spmd.rules.ops.merges", "neutral_element", lambda op, dtype: 0),
        within=f"{_EXTREMES} {_SOFTMAX} aten.logsumexp.default",
    ),
    _silent("logsumexp", "merges", "psum", "aten.logsumexp.default"),
    mutant(
        "body: argmax",
        "places of maxima are counted from the start of the shard",
        replaced("spmd.rules.ops.extremes", "shard_offset", lambda size, axes: 0),
        within=f"{_EXTREMES} aten.topk.default aten.kthvalue.default",
    ),
    _silent("argmax values", "extremes", "pmax", "aten.argmax.default aten.max.dim"),
    _local("argmax alone", "argmax argmin max.dim min.dim"),
    # products
    of_rule("mm: not finished", "products over a sharded dim pass for whole", "mm", _unreduced),
    of_rule("mm: as max", "products over a sharded dim are combined by maximum", "mm", _reduced_by("max")),
    of_rule("bmm: not finished", "batched products over a sharded dim pass for whole", "bmm", _unreduced),
    of_rule("mv: not finished", "matrix times vector over a sharded dim passes for whole", "mv dot", _unreduced),
    of_rule(
        "addmm: bias",
        "every rank adds the whole bias to its share of a product",
        "addmm baddbmm addmv addbmm",
        _without_additive,
    ),
    of_rule("trilinear: not finished", "a product of three tensors passes for whole", "_trilinear", _unreduced),
    of_rule("cdist: sum", "distances along some coordinates are added", "_cdist_forward", _reduce_whole("sum")),
    of_rule("cross: sharded", "cross products run on shards of the dim of vectors", "linalg_cross", _free),
    # scans, order, moves
    mutant(
        "rows: of every rank",
        "every rank reads and writes the rows of its shard, whoever holds those that are named",
        replaced("spmd.rules.ops.owners", "local_index", _always_held),
        within=_ROWS,
    ),
    mutant(
        "windows: not sent",
        "rows of other ranks are this rank's own",
        replaced("spmd.rules.ops.window_exchange", "ppermute", lambda x, axes, pairs: x),
        within=_WINDOWS,
    ),
    mutant(
        "body: scan",
        "a rank adds its own total to its scan",
        replaced("spmd.rules.ops.scan", "_before", _including_own),
        within="aten.cumsum.default aten.cumprod.default aten.logcumsumexp.default",
    ),
    _local("scan alone", "cumsum cumprod logcumsumexp"),
    _freely("cummax", "cummax cummin"),
    _freely("sort", "sort sort.stable"),
    _freely("flip", "flip"),
    _freely("roll", "roll"),
    _freely("fft", "_fft_c2c"),
    _freely("matrix exponential", "linalg_matrix_exp"),
    mutant(
        "body: tril",
        "triangles are counted from the start of the shard",
        replaced("spmd.rules.ops.shape", "shard_offset", lambda size, axes: 0),
        within="aten.tril.default aten.triu.default",
    ),
    of_rule(
        "permute: dims stay", "a permutation that keeps the shape leaves axes on their dims", "permute", _elementwise
    ),
    mutant(
        "view: order of factors",
        "a dim that a view joins is sharded minor factor first",
        returning("spmd.rules.ops.shape", "common_factors", _minor_first),
        within="aten.view.default",
    ),
    of_rule("cat: sharded", "the first tensor is joined shard by shard", "cat stack", _shard_first),
    of_rule("repeat: sharded", "shards are repeated", "repeat", _shard_first),
    of_rule(
        "pad: sharded", "every shard is padded", "constant_pad_nd reflection_pad1d replication_pad1d", _shard_first
    ),
    of_rule(
        "pool: sharded", "windows of a pool end with the shard", "max_pool2d_with_indices avg_pool2d", _shard_first
    ),
    of_rule("matrices: sharded", "matrices are factorized shard by shard", "linalg_inv_ex _linalg_det", _shard_first),
    # softmax, norms, attention
    _local("softmax alone", "_softmax _log_softmax"),
    _silent("softmax", "softmax", "psum", _SOFTMAX),
    _silent("softmax maximum", "softmax", "pmax", _SOFTMAX),
    _local("softmax gradient alone", "_softmax_backward_data _log_softmax_backward_data"),
    _silent("norms", "normalization", "psum", _NORMS),
    _local("layer norm alone", "native_layer_norm"),
    of_rule(
        "layer norm: gradients not finished",
        "gradients of weight and bias pass for whole",
        "native_layer_norm_backward",
        _unreduced,
    ),
    mutant(
        "body: batch norm",
        "batch norm counts the elements of the shard",
        Patch("spmd.rules.ops.normalization", "_over_channels", _local_count),
        within="batch_norm batch_norm_statistics instance_norm grad_of_batch_norm",
    ),
    _local("group norm alone", "native_group_norm"),
    of_rule(
        "attention: causal",
        "queries of causal attention are sharded",
        "_scaled_dot_product_flash_attention_for_cpu",
        lambda call, factors: attrs.evolve(factors, replicate=factors.replicate - {"q"}),
    ),
    of_rule(
        "attention: gradients",
        "gradients of keys and values pass for whole",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        _unreduced,
    ),
    # indexing
    of_rule("index: sharded", "positions are looked up in a shard as in the whole", "index.Tensor", _shard_first),
    of_rule("index_select: sharded", "rows are looked up in a shard as in the whole", "index_select", _shard_first),
    of_rule(
        "topk: sharded",
        "the largest of a shard pass for those of the whole",
        "topk kthvalue median.dim mode",
        _shard_first,
    ),
    of_rule("diagonal: sharded", "the diagonal of a shard passes for that of the whole", "diagonal", _shard_first),
    of_rule(
        "select: sharded", "a slice of a shard passes for that of the whole", "select.int slice.Tensor", _shard_first
    ),
    of_rule("unfold: sharded", "windows of a shard pass for those of the whole", "unfold", _shard_first),
    mutant(
        "gather: held",
        "positions of other shards are looked up in this one",
        replaced("spmd.rules.ops.lookup", "local_index", _always_held),
        within="aten.gather.default aten.nll_loss_forward.default aten.nll_loss2d_forward.default",
    ),
    mutant(
        "embedding: held",
        "rows of other shards are looked up in this one",
        replaced("spmd.rules.ops.embedding", "local_index", _always_held),
        within="aten.embedding.default",
    ),
    mutant(
        "loss: held",
        "the gradient of every class goes to every shard of the classes",
        replaced("spmd.rules.ops.loss", "local_index", _always_held),
        within="aten.nll_loss_backward.default aten.nll_loss2d_backward.default",
    ),
    of_rule(
        "index_put: self",
        "what a place holds is counted once a rank",
        "index_put index_add scatter_add scatter_reduce.two",
        _without_additive,
    ),
    of_rule(
        "index_put: not finished",
        "what each rank adds to places passes for all",
        "index_put index_add scatter_add",
        _unreduced,
    ),
    of_rule(
        "scatter: sharded",
        "writes that do not combine are split among ranks",
        "scatter.src scatter.value index_put index_reduce",
        _free,
    ),
    of_rule(
        "embedding: gradient not finished",
        "gradients of a table pass for whole",
        "embedding_dense_backward",
        _unreduced,
    ),
    of_rule(
        "nll: not finished",
        "losses of a share of the batch pass for whole",
        "nll_loss_forward nll_loss2d_forward",
        _unreduced,
    ),
    of_rule(
        "search: not finished",
        "positions in a shard of sorted values pass for positions in all",
        "searchsorted.Tensor bucketize.Tensor",
        _unreduced,
    ),
    # convolutions
    of_rule("convolution: channels", "convolutions of some channels pass for whole", "convolution", _unreduced),
    of_rule(
        "convolution: gradients",
        "gradients from a share of the batch pass for whole",
        "convolution_backward",
        _unreduced,
    ),
    of_rule("convolution: bias", "every rank adds the whole bias to its channels", "convolution", _without_additive),
    _local("convolution alone", "convolution"),
    mutant(
        "halo: left out",
        "ranks have no borders",
        replaced(Halo, "_borders", property(lambda halo: (0, 0))),
        within=_CONVOLUTIONS,
    ),
    mutant(
        "halo: direction",
        "borders are sent the other way",
        Patch(Halo, "_send", lambda send: lambda halo, border, step: send(halo, border, -step)),
        within=_CONVOLUTIONS,
    ),
    mutant(
        "halo: far windows",
        "windows are taken to reach the neighbours at most",
        replaced(Halo, "_near", property(lambda halo: True)),
        within=_CONVOLUTIONS,
    ),
    mutant(
        "convolution: groups",
        "a rank that has some groups keeps the number of all",
        replaced("spmd.rules.ops.convolution", "_grouped", lambda options, channels, weight: list(options)),
        within=_CONVOLUTIONS,
    ),
)
