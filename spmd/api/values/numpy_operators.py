"""NumPy's operators on DTensors: `x + array` is torch's operator with a replicated operand."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch


def run_ufunc(
    replicate: Callable[[torch.Tensor], torch.Tensor],
    ufunc: Any,
    method: str,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
) -> Any:
    """Run a universal function of NumPy of which some inputs are DTensors: `__array_ufunc__`.

    Python's operators are torch's, in the dtype in which NumPy computes. Any other function is NumPy's, of whole
    tensors, and has replicated results.

    Args:
        replicate: from a plain tensor to a DTensor.
        ufunc, method, inputs, options: the arguments of `__array_ufunc__`.
    """
    numpy = sys.modules["numpy"]  # it is there: it calls this
    if method == "__call__" and ufunc.__name__ in _OPERATORS and not options:
        dtype = _dtype(ufunc, inputs) if any(isinstance(leaf, numpy.ndarray) for leaf in inputs) else None
        given = [leaf.item() if isinstance(leaf, numpy.generic) else leaf for leaf in inputs]
        given = [replicate(torch.as_tensor(leaf)) if isinstance(leaf, numpy.ndarray) else leaf for leaf in given]
        given = [leaf.to(dtype) if dtype and isinstance(leaf, torch.Tensor) else leaf for leaf in given]
        return _OPERATORS[ufunc.__name__](*given)
    whole = [leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs]
    results = getattr(ufunc, method)(*whole, **options)
    if isinstance(results, tuple):
        return tuple(replicate(torch.as_tensor(leaf)) for leaf in results)
    return results if results is None or "out" in options else replicate(torch.as_tensor(results))


def _dtype(ufunc: Any, inputs: Sequence[Any]) -> torch.dtype | None:
    """The dtype in which NumPy computes; None if it does not know one of an input, such as bfloat16."""
    numpy = sys.modules["numpy"]
    try:
        given = [torch.empty(0, dtype=x.dtype).numpy() if isinstance(x, torch.Tensor) else x for x in inputs]
    except TypeError:
        return None
    common = numpy.result_type(*given)
    return torch.as_tensor(numpy.empty(0, ufunc.resolve_dtypes((common, common, None))[0])).dtype


_OPERATORS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div, "power": torch.pow,
        "floor_divide": torch.floor_divide, "remainder": torch.remainder, "matmul": torch.matmul,
        "bitwise_and": torch.bitwise_and, "bitwise_or": torch.bitwise_or, "bitwise_xor": torch.bitwise_xor,
        "equal": operator.eq, "not_equal": operator.ne, "less": operator.lt, "less_equal": operator.le,
        "greater": operator.gt, "greater_equal": operator.ge,
    }
)  # fmt: skip
"""Python's operators of two operands by NumPy's names."""
