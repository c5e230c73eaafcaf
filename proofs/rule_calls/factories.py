"""Small calls of the operators that make tensors."""

from __future__ import annotations

import torch

from proofs.rule_calls.draws import Draws, call

aten = torch.ops.aten
_draws = Draws(12)
f = _draws.f

FACTORIES = {
    aten.full.default: [call([4, 5], 2.0)],
    aten.zeros.default: [call([4, 5])],
    aten.ones.default: [call([4, 5])],
    aten.empty.memory_format: [call([4, 5])],
    aten.empty_permuted.default: [call([4, 5], [1, 0])],
    aten.empty_strided.default: [call([4, 5], [5, 1])],
    aten.new_zeros.default: [call(f(3), [4, 5])],
    aten.new_ones.default: [call(f(3), [4, 5])],
    aten.new_full.default: [call(f(3), [4, 5], 2.0)],
    aten.new_empty.default: [call(f(3), [4, 5])],
    aten.scalar_tensor.default: [call(2.0)],
    aten.linspace.default: [call(0, 2, 5)],
    aten.linspace.Tensor_Tensor: [call(f(), f(), 5)],
    aten.linspace.Tensor_Scalar: [call(f(), 2, 5)],
    aten.linspace.Scalar_Tensor: [call(0, f(), 5)],
    aten.logspace.default: [call(0, 2, 5)],
    aten.logspace.Tensor_Tensor: [call(f(), f(), 5)],
    aten.logspace.Tensor_Scalar: [call(f(), 2, 5)],
    aten.logspace.Scalar_Tensor: [call(0, f(), 5)],
    aten.arange.default: [call(5)],
    aten.arange.start: [call(2, 7)],
    aten.arange.start_step: [call(2, 7, 2)],
    aten.eye.default: [call(4)],
    aten.fft_fftfreq.default: [call(5, 0.5)],
    aten.fft_rfftfreq.default: [call(5, 0.5)],
    aten.eye.m: [call(4, 3)],
    aten.tril_indices.default: [call(4, 4)],
    aten.triu_indices.default: [call(4, 4)],
}
