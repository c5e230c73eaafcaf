"""Which operators' kernels read the strides of their operands, and the memory layout that they need.

A program does not say which strides its values have. Lowering therefore inserts a conditional copy before an operand
whose kernel needs a certain layout. `python -m proofs.rule_check --layouts` runs every operator on operands in other
layouts, and reports needs that `PROBED` lacks and needs in it that no run shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch


class Need(IntEnum):
    """The memory layout that an operand must have; each implies those before it.

    `ROWS`: the last dim has stride 1. `CONTIGUOUS`: the strides of a new tensor and storage offset 0, as some kernels
    read from the start of the storage, require alignment, or read the strides of dims of length 1.
    """

    ANY = 0
    ROWS = 1
    CONTIGUOUS = 2

    def is_met(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this layout.

        >>> x = torch.ones(2, 3)
        >>> Need.CONTIGUOUS.is_met(x), Need.ROWS.is_met(x[:, 1:]), Need.ROWS.is_met(x.t())
        (True, True, False)
        """
        if self is Need.ANY or tensor.numel() == 0:
            return True
        if self is Need.ROWS:
            return tensor.ndim == 0 or tensor.stride(-1) == 1
        return tensor.storage_offset() == 0 and tensor.stride() == _contiguous_strides(tensor.shape)

    def lay_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor if it has this layout, else a contiguous copy."""
        return tensor if self.is_met(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = [1, *reversed(shape[1:])]
    return tuple(itertools.accumulate(sizes, int.__mul__))[::-1] if shape else ()


def need(op: torch._ops.OpOverload, argument: str) -> Need:
    """The memory layout that the tensors in an operator's argument must have.

    `Need.CONTIGUOUS` for operators of other libraries, as nothing is known about their kernels.

    Args:
        op: the operator.
        argument: the argument's name in the operator's schema.

    >>> need(torch.ops.aten.view_as_complex.default, "self"), need(torch.ops.aten.neg.default, "self")
    (<Need.CONTIGUOUS: 2>, <Need.ANY: 0>)
    """
    if op.namespace not in _KNOWN:
        return Need.CONTIGUOUS
    needs = PROBED.get(str(op)) or DOCUMENTED.get(str(op)) or {}
    return needs.get(argument, Need.ANY)


@lru_cache(maxsize=4096)
def _has_needs(op: torch._ops.OpOverload) -> bool:
    return any(need(op, argument.name) is not Need.ANY for argument in op._schema.arguments)


def lay_out(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], copy: Callable[..., Any]) -> Any:
    """The arguments of a call, with `copy(leaf, need)` in place of every leaf of an argument that needs a layout.

    Args:
        op: the operator.
        args, kwargs: the arguments of the call; their leaves may be anything.
        copy: called with a leaf and the `Need` of its argument.

    Returns:
        The positional and the keyword arguments: those given if the operator needs no layout.

    >>> lay_out(torch.ops.aten.view_as_complex.default, ("x",), {}, lambda leaf, need: (leaf, need.name))
    ((('x', 'CONTIGUOUS'),), {})
    """

    if not _has_needs(op):
        return args, kwargs

    def given(name: str, argument: Any) -> Any:
        needed = need(op, name)
        return argument if needed is Need.ANY else _map(lambda leaf: copy(leaf, needed), argument)

    names = [argument.name for argument in op._schema.arguments]
    positional = tuple(given(name, argument) for name, argument in zip(names, args, strict=False))
    return positional, {name: given(name, argument) for name, argument in kwargs.items()}


def laid_out(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The arguments of a call, with copies of those tensors that lack the layout that the operator needs."""
    return lay_out(op, args, kwargs, lambda leaf, need: need.lay_out(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    return [_map(function, item) for item in tree] if isinstance(tree, (tuple, list)) else function(tree)


_KNOWN = frozenset({"aten", "prims", "torch_nn", "spmd", "spmd_random"})


def _table(contiguous: Mapping[str, str], rows: Mapping[str, str]) -> Mapping[str, Mapping[str, Need]]:
    """The needs of arguments by operator, from space-separated names of operators and arguments."""
    found: dict[str, dict[str, Need]] = {}
    for layout, lines in ((Need.CONTIGUOUS, contiguous), (Need.ROWS, rows)):
        for ops, names in lines.items():
            for op in ops.split():
                found.setdefault(f"aten.{op}", {}).update(dict.fromkeys(names.split(), layout))
    return MappingProxyType({op: MappingProxyType(needs) for op, needs in found.items()})


PROBED = _table(
    contiguous={
        "_embedding_bag.default _embedding_bag_forward_only.default": "weight indices offsets per_sample_weights",
        "_embedding_bag_backward.default": "indices offsets offset2bag bag_size",
        "_embedding_bag_dense_backward.default": "bag_size",
        "_embedding_bag_per_sample_weights_backward.default": "indices offset2bag",
        "_linalg_det.default _linalg_slogdet.default": "A",
        "_pdist_backward.default": "self pdist",
        "_pdist_forward.default": "self",
        "_scaled_mm.default": "bias",
        "_scaled_mm_v2.default": "scale_a scale_b",
        "_segment_reduce_backward.default": "grad output data lengths offsets",
        "_weight_norm_interface.default": "v g",
        "_weight_norm_interface_backward.default": "grad_w saved_v saved_g saved_norms",
        "adaptive_max_pool3d_backward.default": "indices",
        "as_strided.default as_strided_scatter.default": "self",
        "diagonal_scatter.default select_scatter.default slice_scatter.default": "self",
        "fractional_max_pool2d_backward.default fractional_max_pool3d_backward.default": "indices",
        "linalg_matrix_exp.default": "self",
        "median.dim nanmedian.dim": "self",
        "mkldnn_rnn_layer.default": "input hx_ cx_",
        "mkldnn_rnn_layer_backward.default": "input hx_ cx_tmp output cy_ workspace",
        "gelu_backward.default": "grad_output",
        "native_batch_norm_backward.default": "grad_out input weight running_mean running_var save_mean save_invstd",
        "native_dropout.default": "input",
        "native_group_norm.default": "input weight bias",
        "native_layer_norm_backward.default": "mean rstd",
        "nll_loss2d_backward.default": "self",
        "resize.default": "self",
        "rrelu_with_noise_functional.default": "noise",
        "sort.default": "self",
        "view.default _unsafe_view.default view.dtype view_as_complex.default": "self",
    },
    rows={
        "_scaled_dot_product_flash_attention_for_cpu.default": "query key value",
        "_scaled_dot_product_flash_attention_for_cpu_backward.default": "query key value out",
        "max_pool3d_with_indices.default": "self",
        "max_pool3d_with_indices_backward.default": "grad_output self",
    },
)
"""The needs that show when the operators run on a CPU, by operator and argument."""

OF_SOME_PROCESSORS = frozenset({"aten._scaled_mm.default", "aten.gelu_backward.default"})
"""Operators in `PROBED` whose need shows only on some CPUs, which have other kernels."""

_ATTENTION = "query key value"
_GRADIENTS = "grad_out grad_out_ query key value out"
_STATES = "input weight weight_buf hx cx output grad_output grad_hy grad_cy dropout_state reserve"
_NORMALIZED = "input grad_output weight bias running_mean running_var save_mean save_var reserveSpace"

DOCUMENTED = _table(
    contiguous={
        "_grouped_mm.default": "self mat2",  # torch checks that strides are multiples of 16 bytes
        # torch describes states, weights and reserve buffers to cuDNN and MIOpen by shape, with contiguous strides.
        "_cudnn_rnn.default _cudnn_rnn_backward.default miopen_rnn.default miopen_rnn_backward.default": _STATES,
        "cudnn_batch_norm.default cudnn_batch_norm_backward.default": _NORMALIZED,
        "miopen_batch_norm.default miopen_batch_norm_backward.default": _NORMALIZED,
        "cudnn_grid_sampler.default cudnn_grid_sampler_backward.default": "self grid grad_output",
        "cudnn_affine_grid_generator.default cudnn_affine_grid_generator_backward.default": "theta grad",
        "_cudnn_ctc_loss.default _cudnn_ctc_loss.Tensor": "log_probs targets input_lengths target_lengths",
        "_thnn_fused_lstm_cell.default _thnn_fused_gru_cell.default": "cx hx input_bias hidden_bias",
        "_thnn_fused_lstm_cell_backward_impl.default": "grad_hy grad_cy cx cy workspace",
        "_thnn_fused_gru_cell_backward.default": "grad_hy workspace",
        # Backward kernels of attention index the logsumexp of the forward pass by its shape, without its strides.
        "_scaled_dot_product_flash_attention_backward.default _flash_attention_backward.default": "logsumexp",
        "_scaled_dot_product_efficient_attention_backward.default _efficient_attention_backward.default": "logsumexp",
        "_scaled_dot_product_cudnn_attention_backward.default": "logsumexp",
        "_scaled_dot_product_fused_attention_overrideable_backward.default": "logsumexp",
    },
    rows={
        # The kernels check this: "Input tensor must have contiguous last dimension".
        "_scaled_dot_product_flash_attention.default _scaled_dot_product_flash_attention.quantized": _ATTENTION,
        "_scaled_dot_product_efficient_attention.default": f"{_ATTENTION} attn_bias",
        "_efficient_attention_forward.default": f"{_ATTENTION} bias",
        "_scaled_dot_product_cudnn_attention.default _cudnn_attention_forward.default": f"{_ATTENTION} attn_bias",
        "_scaled_dot_product_fused_attention_overrideable.default": f"{_ATTENTION} attn_bias",
        "_flash_attention_forward.default _flash_attention_forward.quantized": _ATTENTION,
        "_scaled_dot_product_flash_attention_backward.default _flash_attention_backward.default": _GRADIENTS,
        "_scaled_dot_product_efficient_attention_backward.default": f"{_GRADIENTS} attn_bias",
        "_efficient_attention_backward.default": f"{_GRADIENTS} bias",
        "_scaled_dot_product_cudnn_attention_backward.default": f"{_GRADIENTS} attn_bias",
        "_scaled_dot_product_fused_attention_overrideable_backward.default": f"{_GRADIENTS} attn_bias",
    },
)
"""The needs, according to torch's sources, of kernels that do not run on a CPU, by operator and argument."""
