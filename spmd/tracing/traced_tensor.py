"""The tensors that a traced function computes with: they have a shape, a dtype and a name, and no values."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.testing._comparison import ErrorMeta
from torch.utils._python_dispatch import _disable_current_modes

from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.ir.graph import map_leaves
from spmd.tracing.active_transforms import unwrapped
from spmd.tracing.recorder import Recorder
from spmd.tracing.source import where

_Tensor: Any = torch.Tensor
_NUMBER = "Keep it a tensor, or pass the number by static_argnums; spmd.debug.print shows values."
_OUTSIDE = "Return the tensor, and do this with the result; or keep to torch's operators."
_READERS: Mapping[Any, tuple[str, str]] = {
    _Tensor.__bool__: (
        "`if`, `while`, `assert`, `in`, `and`, `or`, `not`, max(), sorted() or bool()",
        "Write torch.where(condition, a, b) or spmd.cond(condition, f, g, x) in place of `if`, spmd.while_loop for "
        "`while`, & and | for `and` and `or`; or decide by a static argument (static_argnums).",
    ),
    _Tensor.__int__: ("int()", _NUMBER),
    _Tensor.__float__: ("float() or math", _NUMBER),
    _Tensor.__complex__: ("complex()", _NUMBER),
    _Tensor.__index__: (
        "range(), a slice or an index of a list",
        "Sizes are those of the program: take x.shape, or pass the number as a static argument (static_argnums). Write "
        "spmd.fori_loop(0, n, body, x) for a loop over range(n), and spmd.switch(i, functions, x) for a list of them.",
    ),
    _Tensor.item: (".item()", _NUMBER),
    _Tensor.__format__: (
        "A format with a specification, as in f\"{x:.2f}\",",
        'Write spmd.debug.print("{:.2f}", x), which prints when the program runs, or print the result outside.',
    ),
    _Tensor.tolist: (".tolist()", _OUTSIDE),
    _Tensor.numpy: (".numpy()", _OUTSIDE),
    _Tensor.__array__: ("A function of numpy", _OUTSIDE),
    _Tensor.__dlpack__: ("Conversion to another library", _OUTSIDE),
    _Tensor.data_ptr: (".data_ptr()", _OUTSIDE),
    _Tensor.__reduce_ex__: ("Pickling or saving", "Return the tensor, and save the result."),
}  # fmt: skip
"""What needs the values of a tensor: how a user writes it, and what to write instead."""
_QUANTIZATION = os.path.join(os.path.dirname(torch.__file__), "ao", "quantization")
_FUSED = (
    "FusedMovingAvgObsFakeQuantize decides in an operator: model.qconfig = "
    'torch.ao.quantization.get_default_qat_qconfig("fbgemm"). Of the observers, those of minima and maxima over all '
    "calls (MinMaxObserver, PerChannelMinMaxObserver) do not decide."
)
_NUMBERS = frozenset(
    {_Tensor.__bool__, _Tensor.__int__, _Tensor.__float__, _Tensor.__complex__, _Tensor.__index__, _Tensor.item}
)
"""Those that make a Python number."""


class TracedTensor(FunctionalTensor):
    """A tensor in a traced function; when the trace has ended, all that needs its values is an error."""

    __bool__ = _Tensor.__bool__
    tolist = _Tensor.tolist

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not _is_running():
            refuse_reading(func, args)
            if func is _Tensor.__deepcopy__:
                raise _leaked(args[0], "copied")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_running() or func in FunctionalTensor.metadata_fns or func is torch.ops.aten.detach.default:
            return super().__torch_dispatch__(func, plain_types(types), args, kwargs)
        raise _passed_on(_leaked(self, "used"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return describe(self)

    def __format__(self, spec: str) -> str:
        if spec:
            refuse_reading(_Tensor.__format__, (self,))
        return describe(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_reading(_Tensor.__reduce_ex__, (self,))

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Another dtype or device; torch's own asks the trace, which may have ended."""
        if not _is_running():
            raise _leaked(self, "used")
        return super().to(*args, **kwargs)


def retyped(result: Any) -> Any:
    """What torch's functionalization returns, with each of its tensors made a `TracedTensor`."""
    return map_leaves(_retype, result)


def _retype(leaf: Any) -> Any:
    if type(leaf) is FunctionalTensor:
        leaf.__class__ = TracedTensor
    return leaf


def plain_types(types: Sequence[type]) -> tuple[type, ...]:
    """The types of a call as torch's functionalization knows them."""
    return tuple(FunctionalTensor if kind is TracedTensor else kind for kind in types)


def is_traced(tensor: Any) -> bool:
    """Whether a value is a tensor of a traced function, under transforms too."""
    return isinstance(unwrapped(tensor), FunctionalTensor)


def describe(tensor: torch.Tensor) -> str:
    """The text that `print` shows: shape, dtype, name in the program, and how to see values."""
    hint = "spmd.debug.print shows its values" if _is_running() else "its trace has ended: return it from the function"
    return f"Traced({TensorMeta.of(tensor)} {_origin(tensor)[0]}; {hint})"


def refuse_reading(func: Any, args: Sequence[Any]) -> None:
    """TraceError for a function that needs the values of a traced tensor, unless it is a number that is known."""
    if func not in _READERS or not args or not is_traced(args[0]):
        return
    if func in _NUMBERS and _is_running() and known_value(args[0]) is not None:
        return
    what, remedy = _READERS[func]
    if not _is_running():
        raise _passed_on(_leaked(args[0], "used"))
    if _is_compared():
        what, remedy = "torch.testing", "Return both tensors, and compare the results."
    elif _is_called_from(_QUANTIZATION):
        what, remedy = "A FakeQuantize or an observer of torch.ao.quantization", _FUSED
    raise _passed_on(
        TraceError(
            f"{what} at {where()} needs the values of tensor {_described(args[0])}, and a function has none while "
            f"it is traced. {remedy}"
        )
    )


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor of the trace that is running; None if it depends on arguments or on random numbers.

    It is computed from the tensors that the function closes over, by the operators that the trace has recorded.
    """
    held = tensor
    while is_functorch_wrapped_tensor(held):
        if is_batchedtensor(held):
            return None
        held = get_unwrapped(held)
    if isinstance(held, FunctionalTensor):
        with temporarily_clear_interpreter_stack():  # views are made again, which no transform may wrap
            torch._sync(held)
        held = torch._from_functional_tensor(held.elem)
    recorder = getattr(held, "fake_mode", None)
    return recorder.known_value(held) if isinstance(recorder, Recorder) else None


def list_of(known: torch.Tensor) -> Any:
    """The numbers of a known value, as nested lists."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes(), torch._C.DisableTorchFunction():
        return known.tolist()


def _leaked(tensor: torch.Tensor, done: str) -> TraceError:
    name, line = _origin(tensor)
    made = f", computed at {line} in a function under jit," if line else ", an argument of a function under jit,"
    return TraceError(
        f"Tensor {name} {TensorMeta.of(tensor)}{made} is {done} at {where()} after the function was traced: it has no "
        "values, and never gets any. Return it from the function instead of keeping it in a list, a global or an "
        "attribute."
    )


def _described(tensor: torch.Tensor) -> str:
    return f"{_origin(tensor)[0]} {TensorMeta.of(tensor)}"


def _origin(tensor: torch.Tensor) -> tuple[str, str]:
    """The name of a traced tensor in its program, and the line that computed it; empty for an argument."""
    held = unwrapped(tensor)
    fake = torch._from_functional_tensor(held.elem)
    recorder = getattr(fake, "fake_mode", None)
    if not isinstance(recorder, Recorder):
        return "", ""
    source = recorder.source_of(fake)
    return recorder.value(fake).name, "" if source is None else where(source)


def _is_running() -> bool:
    """Whether this thread traces a function now."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


def _is_compared() -> bool:
    """Whether torch.testing is comparing tensors."""
    return _is_called_from(torch.testing._comparison.__file__)


def _is_called_from(path: str) -> bool:
    """Test for a running function of a file, or of a folder's files."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(path):
            return True
        frame = frame.f_back
    return False


def _passed_on(error: TraceError) -> Exception:
    """The error, in the form that torch.testing raises as it is instead of as one of its own."""
    return ErrorMeta(TraceError, str(error)) if _is_compared() else error
