"""Decompositions: of means into a sum and a division, and of operators that have no sharding rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch

from spmd.errors import TraceError
from spmd.ir.graph import Graph, Operation, Value, iterate_leaves, map_leaves
from spmd.ir.names import Namer
from spmd.ir.operator_kinds import is_composite
from spmd.ir.source import Source
from spmd.tracing.fused_optimizers import FUSED_DECOMPOSITIONS
from spmd.tracing.numbers import traced
from spmd.tracing.recorder import Recorder

OpOverload = torch._ops.OpOverload
Body = Callable[..., Any]
aten = torch.ops.aten

_MEAN, _SUM = 1, 2  # at::Reduction


def decompose_operations(graph: Graph, needs: Callable[[OpOverload], bool]) -> Graph:
    """Replace every operation for whose operator `needs` is true by its decomposition, one level deep.

    Composite operators have a decomposition of their own; for others, those of torch to the core aten operators take
    precedence over torch's other ones. Operators without a decomposition stay, and so do random operators, since their
    decompositions would draw other numbers. The new operations have the source of the replaced one.
    """
    needed = lambda operation: needs(operation.op) and not operation.is_random  # noqa: E731
    return expand_operations(graph, lambda call: _torch_decomposition(call.op) if needed(call) else None)


def expand_operations(graph: Graph, find: Callable[[Operation], Body | None]) -> Graph:
    """Replace every operation for which `find` returns a decomposition by the operations of the decomposition.

    A decomposition is a function with the operator's arguments and results. An operation stays if its decomposition is
    not implemented for its arguments, returns other shapes or dtypes, or uses torch's `prims` operators.
    """
    recorder = Recorder(Namer(graph.names), lambda: source)
    replaced: dict[Value, Value] = {}
    source: Source | None = None
    for operation in graph.operations:
        operation = operation.substitute(replaced)
        body = find(operation)
        if body is not None:
            source = operation.source
            results = _record_body(recorder, operation, body)
            if results is not None:
                replaced.update(results)
                continue
        recorder.operations.append(operation)
    return attrs.evolve(
        graph,
        constants=(*graph.constants, *recorder.constants.items()),
        operations=tuple(recorder.operations),
        outputs=tuple(replaced.get(value, value) for value in graph.outputs),
    )


def _record_body(recorder: Recorder, operation: Operation, body: Body) -> dict[Value, Value] | None:
    mark = len(recorder.operations)
    fake = lambda leaf: recorder.fake(leaf) if isinstance(leaf, Value) else traced(leaf)  # noqa: E731
    args, kwargs = map_leaves(fake, operation.args), map_leaves(fake, dict(operation.kwargs))
    try:
        with torch.no_grad(), recorder:
            outputs = body(*args, **kwargs)
    except (NotImplementedError, TraceError, TypeError):  # some of torch's decompositions do not fit every overload
        outputs = NotImplemented
    leaves = list(iterate_leaves(outputs))
    values = [recorder.value(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    if outputs is NotImplemented or not _fits(operation, values) or _leaves_aten(recorder.operations[mark:]):
        del recorder.operations[mark:]
        return None
    pairs = zip(operation.results, values, strict=True)
    return {result: value for result, value in pairs if result is not None and value is not None}


def _fits(operation: Operation, values: Sequence[Value | None]) -> bool:
    if len(values) != len(operation.results):
        return False
    pairs = zip(operation.results, values, strict=True)
    return all(result is None or (value is not None and value.meta == result.meta) for result, value in pairs)


def _leaves_aten(operations: Sequence[Operation]) -> bool:
    """Whether a decomposition uses torch's `prims` operators, which have no sharding rules, except for dtype casts."""
    return any(op.op.namespace == "prims" and op.op is not _CONVERT for op in operations)


_CONVERT = torch.ops.prims.convert_element_type.default


@lru_cache(maxsize=4096)
def _torch_decomposition(op: OpOverload) -> Body | None:
    if is_composite(op):
        return op.decompose  # type: ignore[no-any-return]
    return _known_decompositions().get(op)


@lru_cache(maxsize=1)
def _known_decompositions() -> Mapping[OpOverload, Body]:
    from torch._decomp import core_aten_decompositions, decomposition_table  # slow to build, so only when needed

    return {**decomposition_table, **dict(core_aten_decompositions().items())}


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's kernels accumulate a mean of `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    dims = _dims(x, dim)
    result = dtype or x.dtype
    total = aten.sum.dim_IntList(x, dims, keepdim, dtype=_wide(result))
    return (total / math.prod(x.shape[d] for d in dims)).to(result)


def _dims(x: torch.Tensor, dim: Any) -> list[int]:
    """The dims that a reduction is over: all dims if `dim` is None or empty, and none for a 0-d tensor."""
    return list(range(x.ndim)) if dim is None or len(dim) == 0 or x.ndim == 0 else list(dim)


def _variance(
    x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.is_complex():
        raise NotImplementedError
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    wide = x.to(_wide(x.dtype))
    mean = aten.sum.dim_IntList(wide, dims, True) / count
    centered = wide - mean
    freedom = max(count - (1 if correction is None else correction), 0)
    variance = aten.sum.dim_IntList(centered * centered, dims, keepdim) / freedom
    shape = variance.shape
    return variance.to(x.dtype), mean.reshape(shape).to(x.dtype)


def _var(x: torch.Tensor, dim: Any = None, **options: Any) -> torch.Tensor:
    return _variance(x, dim, **options)[0]


def _std(x: torch.Tensor, dim: Any = None, **options: Any) -> torch.Tensor:
    return _variance(x, dim, **options)[0].sqrt()


def _nll_forward(op: OpOverload) -> Body:
    def body(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
        if reduction != _MEAN:
            return NotImplemented
        total, total_weight = op(x, target, weight, _SUM, ignore_index)
        if weight is None:  # a count of targets needs no scores, so that its sum over ranks can come early
            counted = (target != ignore_index).to(_wide(x.dtype))
            total_weight = aten.sum.dim_IntList(counted, list(range(target.ndim))).to(x.dtype)
        return total / total_weight, total_weight

    return body


def _nll_backward(op: OpOverload) -> Body:
    def body(
        grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total_weight: Any
    ) -> torch.Tensor:
        if reduction != _MEAN:
            return NotImplemented
        return op(grad / total_weight, x, target, weight, _SUM, ignore_index, total_weight)  # type: ignore[no-any-return]

    return body


def _multilabel_margin(x: torch.Tensor, target: torch.Tensor, reduction: int) -> Any:
    if reduction != _MEAN or x.ndim < 2:
        return NotImplemented
    total, targets = aten.multilabel_margin_loss_forward.default(x, target, _SUM)
    return total / x.shape[0], targets


def _margin_backward(op: OpOverload) -> Body:
    """The gradient of a loss that is a mean over the batch, computed as that of a sum."""
    parameters = op._schema.arguments
    at = [parameter.name for parameter in parameters].index("reduction")

    def body(*args: Any) -> torch.Tensor:
        given = [*args, *(parameter.default_value for parameter in parameters[len(args) :])]
        if given[at] != _MEAN:
            return NotImplemented
        grad, x = given[:2]
        given[0], given[at] = grad / (x.shape[0] if x.ndim > 1 else 1), _SUM
        return op(*given)  # type: ignore[no-any-return]

    return body


def _embedding_renorm(table: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float) -> torch.Tensor:
    """The table with the rows that `indices` selects scaled down to norm `max_norm` where theirs is larger."""
    norms = torch.linalg.vector_norm(table, norm_type, 1)
    used = torch.zeros_like(norms).index_fill(0, indices.flatten(), 1.0)
    scale = torch.where((used > 0) & (norms > max_norm), max_norm / (norms + 1e-7), 1.0)
    return table * scale.unsqueeze(1)


def _gather(x: torch.Tensor, dim: int, index: torch.Tensor, **options: Any) -> Any:
    """Gather with int64 indices: torch 2.13's kernel for expanded indices reads int32 indices as int64."""
    return aten.gather.default(x, dim, index.long(), **options) if index.dtype is torch.int32 else NotImplemented


def _index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    """A write of whole items; unlike `index_put`, it refuses negative positions."""
    if not x.ndim:
        return NotImplemented
    places = torch.arange(x.shape[dim], device=index.device).index_select(0, index.reshape(-1))
    return x.index_put((*(None,) * (dim % x.ndim), places), source)


def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Any:
    """A write of one number; unlike `index_copy`, it takes negative positions."""
    if not x.ndim:
        return NotImplemented
    number = value.to(x.dtype) if isinstance(value, torch.Tensor) else x.new_full((), value)
    return x.index_put((*(None,) * (dim % x.ndim), index.reshape(-1)), number)


def _diag_embed(x: torch.Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> torch.Tensor:
    """A write to diagonals of zeros, so that no rank compares all places of a matrix, as torch's decomposition does."""
    shape, length = list(x.shape[:-1]), x.shape[-1] + abs(offset)
    for dim in sorted(dim % (x.ndim + 1) for dim in (dim1, dim2)):
        shape.insert(dim, length)
    return aten.diagonal_scatter.default(x.new_zeros(shape), x, offset, dim1, dim2)  # type: ignore[no-any-return]


def _batch_norm_eval(
    x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, variance: torch.Tensor, momentum: float, eps: float
) -> tuple[torch.Tensor, ...]:
    wide = _wide(x.dtype)
    shape = [-1, *(1,) * (x.ndim - 2)]
    result = (x.to(wide) - mean.to(wide).view(shape)) * (variance.to(wide) + eps).rsqrt().view(shape)
    result = result if weight is None else result * weight.view(shape)
    result = result if bias is None else result + bias.view(shape)
    return result.to(x.dtype), x.new_zeros(0), x.new_zeros(0)


_ALONG_TIME: tuple[Any, ...] = ([1], False, [0], 1)  # dilation, transposed, output_padding, groups


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = _wide(grad.dtype)
    grad, direction = grad.to(wide), v.to(wide)
    others = [each for each in range(v.ndim) if each != dim % v.ndim]
    along = aten.sum.dim_IntList(grad * direction, others, True)
    grad_v = g / norms * (grad - direction * (along / (norms * norms)))
    return grad_v.to(v.dtype), (along / norms).to(g.dtype)


def _conv_tbc(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pad: int = 0) -> torch.Tensor:
    """A 1-d convolution of a tensor of shape [time, batch, channels]."""
    found = aten.convolution.default(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, [1], [pad], *_ALONG_TIME)
    return found.permute(2, 0, 1)


def _conv_tbc_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pad: int
) -> tuple[torch.Tensor, ...]:
    of_x, of_weight, of_bias = aten.convolution_backward.default(
        *(grad.permute(1, 2, 0), x.permute(1, 2, 0), weight.permute(2, 1, 0)),
        *(list(bias.shape), [1], [pad], *_ALONG_TIME, [True, True, True]),
    )
    return of_x.permute(2, 0, 1), of_weight.permute(2, 1, 0), of_bias


def _torch_body(op: OpOverload) -> Body:
    """torch's own decomposition of an operator, looked up when it is called, because the table is slow to build."""

    def body(*args: Any, **kwargs: Any) -> Any:
        decomposition = _torch_decomposition(op)
        return NotImplemented if decomposition is None else decomposition(*args, **kwargs)

    return body


_LOSSES = (
    aten.mse_loss.default, aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default,
    aten.huber_loss.default, aten.huber_loss_backward.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss.default, aten.soft_margin_loss_backward.default,
)  # fmt: skip

DECOMPOSITIONS: Mapping[OpOverload, Body] = {
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.var_mean.correction: _variance,
    aten.var.correction: _var,
    aten.std.correction: _std,
    aten.nll_loss_forward.default: _nll_forward(aten.nll_loss_forward.default),
    aten.nll_loss2d_forward.default: _nll_forward(aten.nll_loss2d_forward.default),
    aten.nll_loss_backward.default: _nll_backward(aten.nll_loss_backward.default),
    aten.nll_loss2d_backward.default: _nll_backward(aten.nll_loss2d_backward.default),
    aten.multi_margin_loss_backward.default: _margin_backward(aten.multi_margin_loss_backward.default),
    aten.multilabel_margin_loss_forward.default: _multilabel_margin,
    aten.multilabel_margin_loss_backward.default: _margin_backward(aten.multilabel_margin_loss_backward.default),
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.conv_tbc.default: _conv_tbc,
    aten.conv_tbc_backward.default: _conv_tbc_backward,
    aten.embedding_renorm.default: _embedding_renorm,
    aten.gather.default: _gather,
    aten.index_copy.default: _index_copy,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
    aten._native_batch_norm_legit_no_training.default: _batch_norm_eval,
    aten.diag_embed.default: _diag_embed,
    aten.fill.Tensor: lambda x, value: value.to(x.dtype).expand(x.shape),
    aten.copy.default: lambda x, source, non_blocking=False: source.to(x.dtype).expand(x.shape),
    **{op: _torch_body(op) for op in _LOSSES},
    **FUSED_DECOMPOSITIONS,
}
"""Decompositions that are always applied: sums of shards add up to the global sum, means of shards do not."""
