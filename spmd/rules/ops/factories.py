"""Operators that make tensors from sizes."""

from __future__ import annotations

from spmd.rules.notation import factors
from spmd.rules.partial import ignores, increasing, linear
from spmd.rules.rule import table

_ENDS = (linear("start end"), increasing("start", "end"))

FACTORIES = table({
    "full zeros ones empty.memory_format empty_permuted": factors(" -> ...", size_argument=0),
    "new_zeros new_ones new_full new_empty": factors("* -> ...", ignores("self"), size_argument=1),
    "scalar_tensor": factors(" -> "),
    "linspace logspace arange arange.start arange.start_step fft_fftfreq fft_rfftfreq": factors(" -> _"),
    "linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor": factors(", -> _", *_ENDS),
    "logspace.Tensor_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor": factors(", -> _"),
    "eye eye.m tril_indices triu_indices": factors(" -> _ _"),
})  # fmt: skip
