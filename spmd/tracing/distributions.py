"""`torch.distributions` in a trace: what it checks of values becomes an effect of the program.

Constructors, `log_prob` and `kl_divergence` raise if values are wrong: `if not valid.all(): raise ValueError`. A trace
has no values. There the answer is that they are right, and an operator of the program raises if they are not.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, MappingProxyType
from typing import Any

import torch
from torch.distributions import Distribution, constraints, kl, transforms, wishart

from spmd.collectives.callbacks import check_values
from spmd.errors import TraceError
from spmd.job.user_code import is_user_file
from spmd.tracing.running import is_tracing
from spmd.tracing.source import user_source, where
from spmd.tracing.traced_tensor import is_traced, known_value

_FOLDER = os.path.dirname(os.path.abspath(torch.distributions.__file__)) + os.sep
_Tensor: Any = torch.Tensor
_ALL = frozenset({torch._is_all_true, torch.all, _Tensor.all})
_REDUCTIONS = _ALL | {torch.any, _Tensor.any}
_READS = frozenset({_Tensor.__bool__, _Tensor.item})
_INDEXING = frozenset({_Tensor.__getitem__, _Tensor.__setitem__})
VALUE_DEPENDENT = _REDUCTIONS | _READS | _INDEXING
"""The functions by which torch.distributions decides by values."""
_SAMPLERS = frozenset({"rsample", "_rejection_sample"})
_ERRORS: Mapping[CodeType, type[Exception]] = MappingProxyType(
    {
        wishart._mvdigamma.__code__: AssertionError,
        kl._kl_binomial_binomial.__code__: NotImplementedError,
        transforms.AffineTransform.__eq__.__code__: NotImplementedError,
        transforms.PowerTransform.__eq__.__code__: NotImplementedError,
    }
)
"""The errors that are no ValueError. There is no divergence between transforms that differ."""


def for_distributions(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function in `VALUE_DEPENDENT` if torch.distributions calls it, without the values.

    Returns:
        The result; NotImplemented for another caller.

    Raises:
        TraceError: a sampler draws again until its values are right.
    """
    if func in _INDEXING and not (isinstance(args[1], torch.Tensor) and args[1].dtype is torch.bool):
        return NotImplemented
    frame = _caller()
    if frame is None:
        return NotImplemented
    if func in _INDEXING:
        return _masked(*args)
    if func in _READS:
        return _answer(frame, args[0])
    result = func(*args, **kwargs)
    result._spmd_reduced = (args[0], func in _ALL)
    return result


def _masked(x: torch.Tensor, mask: torch.Tensor, value: Any = None) -> Any:
    """`x[mask]`, or `x[mask] = value`, where all elements stand for the selected ones, and others are 1."""
    if value is None or (isinstance(value, torch.Tensor) and value.shape == x.shape):
        mask = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
        return torch.where(mask, x, 1) if value is None else x.copy_(torch.where(mask, value, x))
    return NotImplemented  # one number


def _answer(frame: FrameType, read: torch.Tensor) -> Any:
    """The bool that stands for right values, which the program checks."""
    if not is_traced(read) or known_value(read) is not None:
        return NotImplemented
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if name in _SAMPLERS:
        module = os.path.basename(file).removesuffix(".py")
        raise TraceError(
            f"A sampler of torch.distributions.{module} draws again until its values are right, at "
            f"{where(user_source())}, and a program has a fixed number of draws. Sample before the function under jit, "
            "and pass the sample."
        )
    operand, is_all = getattr(read, "_spmd_reduced", (None, False))
    if operand is None:
        return NotImplemented
    is_part = name == "check"  # of a constraint, which `_symmetric` combines with the other part
    if not is_part and "warnings.warn" not in linecache.getline(file, frame.f_lineno + 1):
        _check(frame, operand if is_all else ~operand)
    return is_all


def _check(frame: FrameType, valid: torch.Tensor) -> None:
    """Make a check of torch.distributions part of the program."""
    names, code = frame.f_locals, frame.f_code
    value = names.get("value")
    owner, shape = type(names.get("self")).__name__, tuple(getattr(value, "shape", ()))
    if code is Distribution.__init__.__code__:
        message = (
            f"Expected parameter {names['param']} (Tensor of shape {shape}) of distribution {owner} to satisfy the "
            f"constraint {names['constraint']!r}"
        )
    elif code is Distribution._validate_sample.__code__:
        message = (
            f"Expected value argument (Tensor of shape {shape}) to be within the support ({names['support']!r}) of the "
            f"distribution {owner}"
        )
    else:
        line = linecache.getline(code.co_filename, frame.f_lineno).strip()
        place = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} (`{line}`)"
        message = f"torch.distributions refuses the values of its arguments at {place}"
    values = [value] if isinstance(value, torch.Tensor) else []
    check_values(valid, values, _ERRORS.get(code, ValueError), message)


def _caller() -> FrameType | None:
    """The frame of torch.distributions that calls a function of torch; None if something else calls it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_FOLDER):
            return frame
        frame = frame.f_back
    return None


def _symmetric(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """The `check` of a constraint on symmetric matrices, which in a trace is not left early."""

    def check(self: Any, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torchs(self, value)
        return found & constraints._Symmetric.check(self, value) if is_tracing() else found  # type: ignore[attr-defined]

    return check


def _take_floats() -> None:
    """Let torch.distributions take dynamic floats, too, where it takes numbers."""
    modules: dict[str, Any] = dict(sys.modules)
    for name, module in modules.items():
        if name.startswith(f"{torch.distributions.__name__}.") and hasattr(module, "_Number"):
            module._Number = (*module._Number, torch.SymFloat)


# Once, and not in each trace: other threads may make distributions meanwhile.
_take_floats()
for _constraint in (constraints._PositiveDefinite, constraints._PositiveSemidefinite):  # type: ignore[attr-defined]
    _constraint.check = _symmetric(_constraint.check)  # type: ignore[method-assign]
