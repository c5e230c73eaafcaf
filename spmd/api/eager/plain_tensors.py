"""Plain tensors beside DTensors: which of them torch made by itself, such as the causal mask of an attention.

Only frames tell: a tensor does not say who made it. It is torch's own if torch's code is running, and nothing that the
user gave to it holds a plain tensor, of which the tensor might be a view, a copy or a function.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import itertools
import linecache
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn.utils.rnn import PackedSequence

from spmd.api.values.distribute import distribute
from spmd.api.values.dtensor import DTensor
from spmd.collectives.distributed.agreement import check_agreement, describe, spans_processes
from spmd.core.mesh import Mesh
from spmd.job import checks
from spmd.job.user_code import is_torch_file, is_user_file
from spmd.tracing.source import where

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep

_LIMIT = 10_000  # the most objects of the locals of frames that are looked at


def is_number(tensor: torch.Tensor) -> bool:
    """Test for a number, or one that is expanded, as torch's gradients are."""
    return tensor.numel() <= 1 or (tensor.layout is torch.strided and not any(tensor.stride()))


def refusal(tensor: torch.Tensor) -> str | None:
    """None if torch made a plain operand of the running operator; else what to do if it seems so and cannot be told."""
    if (
        tensor.layout is torch.strided
        and not is_functorch_wrapped_tensor(tensor)
        and tensor.untyped_storage() in _written
    ):
        return None
    if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
        return ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is None:
        return ""
    if is_user_file(frame.f_code.co_filename):  # it called a function of torch that has no frame
        return _refusal_by_source(frame)
    return None if _is_torchs(frame) and (is_backward() or not _is_in_reach(tensor, frame)) else ""


def is_backward() -> bool:
    """Test for a backward pass: the plain tensors of torch's derivatives depend on shapes alone."""
    return torch._C._current_graph_task_id() != -1


def remember(tensor: torch.Tensor) -> None:
    """Let a plain tensor that torch made, to which values of DTensors are written, count as replicated from now on."""
    _written.add(tensor.untyped_storage())


_written: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def check_replicas(op: Any, mesh: Mesh, tensors: Sequence[torch.Tensor]) -> None:
    """Compare tensors that torch made between the ranks of a mesh, the first time at each line.

    Torch may have drawn them. With `check="calls"` they are compared each time.

    Raises:
        DivergenceError: on every rank, if they hold different tensors.
    """
    place = where()
    if tensors and spans_processes(mesh) and (checks.every_call or (mesh, place, op) not in _compared):
        name = f"A plain tensor that torch made for {op} at {place}"
        claims = {name + f" ({number})" * bool(number): describe(tensor) for number, tensor in enumerate(tensors)}
        check_agreement(f"{op} on {mesh}", claims, _SAME_SEED, mesh.ranks)
        _compared.add((mesh, place, op))


_SAME_SEED = "If it is drawn, call torch.manual_seed with the same seed on all ranks."

_compared: set[tuple[Mesh, str, Any]] = set()


def _is_in_reach(tensor: torch.Tensor, nearest: FrameType) -> bool:
    """Test the arguments of torch's frames, from one outward, for a plain tensor."""
    modules: list[torch.nn.Module] = []
    frame: FrameType | None = nearest
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        arguments = _arguments(frame)
        modules += (value for value in arguments.values() if isinstance(value, torch.nn.Module))
        if not (_is_torchs(frame) and _is_torchs(frame.f_back)):
            given = {name: value for name, value in arguments.items() if not isinstance(value, torch.nn.Module)}
            if any(_has_plain(value) and not _is_assigned(frame, name) for name, value in given.items()):
                return True
        frame = frame.f_back
    inner = modules[0].modules() if modules else ()
    if any(is_plain(tensor) for module in itertools.chain(inner, modules) for tensor in _own_tensors(module)):
        return True
    held = [module.__dict__ for outer in modules for module in outer.modules()]
    while frame is not None:  # the user's frames
        held.append(frame.f_locals)
        frame = frame.f_back
    return any(_shares_memory(tensor, other) for other in _tensors(held, attributes=False))


def _is_torchs(frame: FrameType | None) -> bool:
    return frame is not None and is_torch_file(frame.f_code.co_filename)


def _arguments(frame: FrameType) -> dict[str, Any]:
    """The arguments of a frame's function, as they are now."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    values = frame.f_locals
    return {name: values[name] for name in code.co_varnames[:count] if name in values}


def _is_assigned(frame: FrameType, name: str) -> bool:
    """Test whether torch's function assigned to a parameter that was no plain tensor."""
    back = frame.f_back
    is_new = back is not None and is_user_file(back.f_code.co_filename) and name in _assigned_names(frame.f_code)
    return is_new and _refusal_by_source(back) is None  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _assigned_names(code: CodeType) -> frozenset[str]:
    return frozenset(found.argval for found in dis.get_instructions(code) if found.opname.startswith("STORE_"))


def is_plain(value: Any) -> bool:
    """Test for a tensor or array that is neither a DTensor nor a number."""
    if not isinstance(value, torch.Tensor):
        return hasattr(type(value), "__array__") and getattr(value, "size", 1) != 1
    while is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return not isinstance(value, DTensor) and not is_number(value)


def _has_plain(value: Any) -> bool:
    """Test a value for a plain tensor; an object of torch may hold numbers as one.

    `Binomial(5, p)` is such an object.
    """
    found = filter(is_plain, _tensors([value]))
    if type(value).__module__.startswith("torch.") and hasattr(value, "__dict__"):
        return any(
            not (isinstance(tensor, torch.Tensor) and (tensor == tensor.reshape(-1)[0]).all()) for tensor in found
        )
    return any(True for _ in found)


def _own_tensors(module: torch.nn.Module) -> Iterable[Any]:
    """The parameters, buffers and other tensors of a module, without those of its submodules."""
    values = module.__dict__.values()
    return itertools.chain(values, *(value.values() for value in values if isinstance(value, dict)))


def _tensors(values: Iterable[Any], *, attributes: bool = True) -> Iterator[Any]:
    """The tensors and arrays in values: in containers, and in the attributes of objects that are no modules."""
    stack, seen = list(values), set[int]()
    while stack and (attributes or len(seen) < _LIMIT):
        value = stack.pop()
        if value is None or isinstance(value, (int, float, str, type, ModuleType)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor) or hasattr(type(value), "__array__"):
            yield value
        elif isinstance(value, PackedSequence):
            stack.append(value.data)  # its other tensors are places in it
        elif isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            stack += value
        elif attributes and not isinstance(value, torch.nn.Module) and type(value).__module__ != "builtins":
            stack += getattr(value, "__dict__", {}).values()


def _shares_memory(tensor: torch.Tensor, other: Any) -> bool:
    if not isinstance(other, torch.Tensor) or isinstance(other, DTensor) or is_functorch_wrapped_tensor(other):
        return False
    is_dense = other.layout is torch.strided and other.device == tensor.device
    return is_dense and tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


def _refusal_by_source(frame: FrameType) -> str | None:
    """None if the call that a user's frame is making has, by its source, no plain tensor among its arguments."""
    call, reader = _expression(frame.f_code, frame.f_lasti, frame.f_lineno), _SourceReader(frame)
    if isinstance(call, ast.Compare) and any(map(reader.is_array, (call.left, *call.comparators))):
        return None  # `==` makes a tensor of an array, other operators call `__array_ufunc__`
    if not isinstance(call, ast.Call):
        return ""
    if reader.calls_torch(call) and reader.arguments(call) != _PLAIN:
        return None
    return (
        f" If {reader.unknown} is a DTensor, and torch made the plain one, give it a name first."
        if reader.unknown
        else ""
    )


@functools.lru_cache(maxsize=1024)
def _expression(code: CodeType, at: int, line: int) -> ast.expr | None:
    """The expression that an instruction evaluates; None if there is no source of it."""
    place: tuple[int | None, int | None, int | None, int | None] = (line, line, None, None)
    if hasattr(code, "co_positions"):
        place = next(itertools.islice(code.co_positions(), at // 2, None), (None, None, None, None))
        if None in place:
            return None
    first, last, start, end = place
    assert first is not None
    text = [part.encode() for part in linecache.getlines(code.co_filename)[first - 1 : last]]
    if not text:
        return None
    text[-1] = text[-1][:end]
    text[0] = text[0][start:]
    try:
        return ast.parse(b"(" + b"".join(text).strip() + b")", mode="eval").body
    except SyntaxError:
        return None


_OTHER, _DTENSOR, _PLAIN = range(3)
_NUMBERS = frozenset({"bool", "float", "int", "len", "max", "min", "round", "abs", "isinstance"})
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
_LEAVE_MESH = frozenset({"full_tensor", "full_tree", "numpy", "to_local"})
_MISSING = object()


class _SourceReader:
    """Reads from the source of a call whether its arguments are DTensors, plain tensors, or others.

    What is not known counts as plain.

    Args:
        frame: the frame that makes the call.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self.unknown = ""  # a call of which it is not known whether its result is a DTensor

    def arguments(self, call: ast.Call) -> int:
        """The worst kind of a call's arguments, and of the tensor of which it is a method."""
        kinds = [self.kind(child) for child in (*call.args, *(keyword.value for keyword in call.keywords))]
        return max(*kinds, self._receiver(call), _OTHER)

    def kind(self, node: ast.AST) -> int:
        """The kind of an expression."""
        value = self._value(node)
        if value is not _MISSING:
            return max((_PLAIN if is_plain(tensor) else _DTENSOR for tensor in _tensors([value])), default=_OTHER)
        if isinstance(node, ast.Attribute):
            kind = self.kind(node.value)
            return _OTHER if kind == _DTENSOR and node.attr not in _VIEWS else kind
        if isinstance(node, ast.Call):
            return self._result(node)
        if isinstance(node, (ast.Name, ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)):
            return _PLAIN
        return max(map(self.kind, ast.iter_child_nodes(node)), default=_OTHER)

    def is_array(self, node: ast.AST) -> bool:
        """Test for an expression that is an array of NumPy."""
        value = self._value(node)
        if value is not _MISSING:
            return type(value).__module__ == "numpy"
        if isinstance(node, ast.Call):
            is_method = isinstance(node.func, ast.Attribute) and self.is_array(node.func.value)
            return is_method or getattr(self._value(node.func), "__module__", None) == "numpy"
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            return self.is_array(node.value)
        parts = list(ast.iter_child_nodes(node)) if isinstance(node, (ast.BinOp, ast.UnaryOp)) else []
        return any(map(self.is_array, parts)) and all(
            isinstance(part, (ast.operator, ast.unaryop, ast.Constant)) or self.is_array(part) for part in parts
        )

    def _result(self, call: ast.Call) -> int:
        """The kind of what a call returns."""
        function, name = self._value(call.func), getattr(call.func, "attr", "")
        if name in _LEAVE_MESH:
            return _PLAIN
        if self._receiver(call) == _DTENSOR or function is distribute:
            return _DTENSOR
        found = self.arguments(call)
        if isinstance(call.func, ast.Name) and call.func.id in _NUMBERS:
            return _OTHER
        if found == _DTENSOR and self.calls_torch(call):
            return _DTENSOR
        if found != _PLAIN:
            self.unknown = f"`{ast.unparse(call)}`"
        return _PLAIN

    def calls_torch(self, call: ast.Call) -> bool:
        """Test for a known call of a function, module or tensor of torch."""
        function = self._value(call.func)
        if function is _MISSING or isinstance(getattr(function, "__self__", None), torch.Tensor):
            return self._receiver(call) == _DTENSOR
        owner = type(function) if isinstance(function, torch.nn.Module) else function
        return (getattr(owner, "__module__", None) or "torch").partition(".")[0] == "torch"

    def _receiver(self, call: ast.Call) -> int:
        """The kind of the tensor of which a call is a method."""
        if not isinstance(call.func, ast.Attribute):
            return _OTHER
        value = self._value(call.func.value)
        return self.kind(call.func.value) if value is _MISSING or isinstance(value, torch.Tensor) else _OTHER

    def _value(self, node: ast.AST) -> Any:
        """The value of a constant, a name, or an attribute that is read without running code."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            frame = self._frame
            scopes = (frame.f_locals, frame.f_globals, frame.f_builtins)
            return next((scope[node.id] for scope in scopes if node.id in scope), _MISSING)
        if isinstance(node, ast.Subscript):
            base, key = self._value(node.value), self._value(node.slice)
            is_item = type(base) in (dict, list, tuple) and type(key) in (int, str)
            return base[key] if is_item else _MISSING
        if not isinstance(node, ast.Attribute):
            return _MISSING
        base = self._value(node.value)
        if base is _MISSING or isinstance(base, torch.Tensor):
            return _MISSING
        for scope in ("_parameters", "_buffers", "_modules"):
            if node.attr in getattr(base, "__dict__", {}).get(scope, ()):
                return base.__dict__[scope][node.attr]
        value = inspect.getattr_static(base, node.attr, _MISSING)
        return _MISSING if hasattr(type(value), "__get__") and not callable(value) else value
