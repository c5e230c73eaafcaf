"""Records each operator that torch dispatches as one operation of a graph."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    disable_fake_tensor_cache,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from spmd.collectives.callbacks import HOST_CALLS
from spmd.core.spec import NESTED, TensorMeta
from spmd.errors import TraceError
from spmd.ir.effectful import original
from spmd.ir.evaluation import evaluated
from spmd.ir.graph import Operation, Value, iterate_leaves, map_leaves, producers_of
from spmd.ir.host_functions import Handle
from spmd.ir.list_operators import list_decomposition
from spmd.ir.names import Namer
from spmd.ir.operator_kinds import is_composite
from spmd.ir.random_operators import TEMPLATED, is_random, without_template
from spmd.ir.source import Range, Source
from spmd.job.user_code import is_installed
from spmd.tracing.as_strided import (
    GATHERS,
    SCATTERS,
    in_order,
    on_device,
    overlaps,
    places,
    read_through,
    views,
    write_through,
)
from spmd.tracing.checkpointed import Checkpoints
from spmd.tracing.closed_over import without_values
from spmd.tracing.numbers import number_of, settled, value_of
from spmd.tracing.result_strides import with_kernel_strides
from spmd.tracing.running import Observer
from spmd.tracing.source import where

OpOverload = torch._ops.OpOverload
aten = torch.ops.aten

# Torch 2.11 raises a RuntimeError, as on real tensors; a class of its own came later.
_DeviceMismatch: Any = getattr(fake_tensor, "FakeTensorDeviceMismatchError", ())


class Recorder(FakeTensorMode):
    """A dispatch mode in which tensors are fake and every operator becomes an `Operation`.

    It is a subclass of the fake mode, and not a mode above it, because functionalization requires that the fake mode is
    the next mode below. A tensor that is not fake was made outside of the trace: it becomes one constant of the graph.

    Args:
        namer: generates the names of new values.
        source: returns the user's line of the operator that is being dispatched.
        labels: the names of the inputs in messages.
        drawn: is called with each random operator and its source.

    Attributes:
        observer: what follows the operations, if anything does.
        regions: the checkpointed regions.
        in_no_grad: whether a `detach_copy` follows each operation, in a graph that is differentiated again.
    """

    def __init__(
        self,
        namer: Namer,
        source: Callable[[], Source | None],
        labels: Mapping[Value, str] = MappingProxyType({}),
        drawn: Callable[[OpOverload, Source | None], None] = lambda op, source: None,
    ) -> None:
        super().__init__()
        self._propagating = False
        self.operations: list[Operation] = []
        self.constants: dict[Value, torch.Tensor] = {}
        self._namer = namer
        self._source = source
        self._labels = labels
        self._drawn = drawn
        self.observer: Observer | None = None
        self.in_no_grad = False
        # Keyed by id: each entry keeps its tensor alive, so that Python does not reuse the id.
        self._values: dict[int, tuple[torch.Tensor, Value]] = {}
        self._leaked = WeakIdKeyDictionary()  # after the trace: of tensors that are kept, for errors
        self._fakes: dict[Value, torch.Tensor] = {}
        self._handles: dict[int, Handle] = {}
        self._ranges: list[Range] = []
        self._numbers = itertools.count()
        self.regions = Checkpoints()

    def fake(self, value: Value, device: torch.device | str = "cpu", like: torch.Tensor | None = None) -> torch.Tensor:
        """The fake tensor of a value; created at the first call, contiguous or with the strides of `like`."""
        if value not in self._fakes:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), self._propagation():
                memory = torch.empty(value.meta.shape, dtype=value.meta.dtype, device="meta")
                tensor: torch.Tensor = FakeTensor(self, memory, torch.device(device))
                if like is not None and like.layout is torch.strided and like.stride() != tensor.stride():
                    with self:
                        size = like.untyped_storage().nbytes() // like.element_size()
                        memory = torch.empty(size, dtype=like.dtype, device=device)
                        tensor = memory.as_strided(like.shape, like.stride(), like.storage_offset())
            self._bind(tensor, value)
            self._fakes[value] = tensor
        return self._fakes[value]

    def value(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor; a tensor from outside of the trace becomes a constant.

        Raises:
            TraceError: the tensor belongs to another trace, or has no data to make a constant of.
        """
        known = self._values.get(id(tensor))
        if known is not None:
            return known[1]
        if isinstance(tensor, FakeTensor):
            if tensor in self._leaked:
                return self._leaked[tensor]
            raise TraceError(
                f"A tensor {TensorMeta.of(tensor)} of another trace was used at {where(self._source())}. Do not keep "
                "tensors of a traced function, or of a body of a loop or a branch, in globals, attributes or lists: "
                "return them."
            )
        return self._constant(tensor)

    def lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor for a tensor from outside of the trace, which becomes a constant."""
        return self.fake(self.value(tensor), tensor.device, tensor)

    def inner(self, namer: Namer, labels: Mapping[Value, str]) -> Recorder:
        """A recorder for a function that is traced by itself meanwhile."""
        recorder = Recorder(namer, self._source, labels, self._drawn)
        recorder.observer = self.observer
        return recorder

    def add(self, operation: Operation, replaced: Mapping[Value, Value]) -> tuple[Value | None, ...]:
        """Record an operation that was made elsewhere, with operands replaced; returns new values for its results."""
        results = tuple(v and Value(self._namer.fresh(v.name), v.meta) for v in operation.results)
        self.operations.append(operation.with_operands(lambda value: replaced.get(value, value), results=results))
        if self.observer is not None:
            self.observer.add(self.operations[-1])
        return results

    def owns(self, memory: Iterable[int]) -> bool:
        """Whether storages, by their addresses, are none of inputs and constants."""
        made = producers_of(self.operations)
        given = (fake for value, fake in self._fakes.items() if value not in made)
        return {fake.untyped_storage()._cdata for fake in given}.isdisjoint(memory)

    def add_noted(self, operation: Operation, replaced: Mapping[Value, Value]) -> tuple[Value | None, ...]:
        """As `add`, of an operation that may draw, and belongs to the checkpointed regions of here."""
        if operation.is_random:
            self._drawn(operation.op, operation.source)
        results = self.add(operation, replaced)
        self.regions.note(self.operations[-1])
        return results

    def line(self) -> Source | None:
        """The user's line that is running."""
        return self._source()

    def close(self) -> None:
        """Let go of all tensors: cycles of fake ones and the recorder would keep what the function closes over."""
        self._leaked.update((tensor, value) for tensor, value in self._values.values())
        for tensors in (self._values, self._fakes, self.constants):
            tensors.clear()

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that does not depend on inputs or on random numbers, else None."""
        value = self.value(tensor)
        with temporarily_clear_interpreter_stack(), _disable_current_modes(), torch._C.DisableTorchFunction():
            return evaluated(value, self.operations, self.constants)

    def _known_values(self, args: Sequence[Any]) -> list[Any] | None:
        """The arguments of an operator with `known_value` for each tensor; None if one is not known."""
        known = [self.known_value(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in args]
        return None if any(leaf is None for leaf in known) else known

    def source_of(self, tensor: torch.Tensor) -> Source | None:
        """The line of the operation that produced a tensor, or of its nearest ancestor that has a line."""
        producers = producers_of(self.operations)
        pending = [self.value(tensor)]
        for candidate in pending:
            operation = producers.get(candidate)
            if operation is not None and operation.source is not None:
                return operation.source
            pending.extend(reversed(operation.operands if operation is not None else ()))
        return None

    def mutation(self, target: torch.Tensor, source: Source | None) -> TraceError:
        """The error for a write to an argument or to a closed-over tensor."""
        value = self.value(target)
        label = f"argument {self._labels[value]}" if value in self._labels else "closed-over tensor"
        return TraceError(
            f"In-place write to {label} {value.meta} at {where(source)}. Arguments and tensors from outside are never "
            "mutated: compute a new tensor, or write to a copy (x = x.clone()), and return it; state goes in and comes "
            f"out.{_copy_of_state(source)}"
        )

    def __torch_dispatch__(  # type: ignore[override]
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._propagating:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        body = func.decompose if is_composite(func) else list_decomposition(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        if func in GATHERS or func in SCATTERS:
            return self._as_strided(func, types, args, kwargs)
        if _is_number_for_tensor(func, args):
            with self:
                return func(aten.scalar_tensor.default(args[0], dtype=_number_dtype(args[0])), *args[1:], **kwargs)
        if func in _SHAPED_BY_NUMBERS:
            args = map_leaves(settled, args)
        if func in _TO_PYTHON and (known := self._known_values(args)) is not None:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return func(*known)
        if func.namespace == "profiler":
            self._note_range(func, args)
        source = self._source()
        if self._ranges and source is not None:
            source = attrs.evolve(source, ranges=tuple(self._ranges))
        if func._schema.is_mutable:
            tensors = [leaf for leaf in iterate_leaves(args) if isinstance(leaf, torch.Tensor)]
            raise self.mutation(tensors[0], source)
        if is_random(func, args, kwargs):
            _reject_generator(func, kwargs, source)
            self._drawn(func, source)
            if func in TEMPLATED:
                func, args, kwargs = without_template(func, (self._template(args[0]), *args[1:]), kwargs)
        arguments, options = self._symbols(args), self._symbols(kwargs)
        if (original(func) or func) in HOST_CALLS:
            arguments = (*arguments[:-1], self._handle(arguments[-1]))
        fake_args, fake_kwargs = self._lower(args), self._lower(kwargs)
        try:
            with self._propagation():
                outputs = super().__torch_dispatch__(func, types, fake_args, fake_kwargs)
                with self:
                    outputs = with_kernel_strides(func, fake_args, outputs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _data_dependent(func, error, source) from None
        except _DeviceMismatch as error:
            raise RuntimeError(str(error)) from None  # the type of the error on real tensors
        except (UnsupportedOperatorException, RuntimeError) as error:
            if not _is_unknown(error):
                raise
            if "nested" in func.name():
                raise self._nested() from None
            raise TraceError(
                f"{func} at {where(source)} does not say which shape its results have, which a trace needs. "
                f"{_of_own(func)}"
            ) from None
        self._record(func, arguments, options, outputs, source)
        return outputs

    def dispatch(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Any = MappingProxyType({})
    ) -> Any:
        """Compute the fake result of an operator."""
        if func not in _BY_STORAGE:
            return super().dispatch(func, types, args, kwargs)
        with disable_fake_tensor_cache(self):
            return super().dispatch(func, types, args, kwargs)

    @contextlib.contextmanager
    def _propagation(self) -> Iterator[None]:
        """A context in which operators are not recorded: those that fake propagation itself calls."""
        before, self._propagating = self._propagating, True
        try:
            yield
        finally:
            self._propagating = before

    def _as_strided(self, func: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Record `as_strided` as views or a gather, `as_strided_scatter` as a write; the result has torch's strides."""
        fakes, options = self._lower(args), self._lower(kwargs)
        with self._propagation():
            result: Any = super().__torch_dispatch__(func, types, fakes, options)
        given = {
            parameter.name: value for parameter, value in zip(func._schema.arguments, fakes, strict=False)
        } | options
        x, geometry = given["self"], (given["size"], given["stride"], given.get("storage_offset"))
        if func in SCATTERS:
            made = None if overlaps(x) else self._written(x, geometry, given["src"])
        else:
            made = self._read(x, geometry)
        if made is None:
            raise TraceError(
                f"{func} at {where(self._source())} reaches elements outside of its operand "
                f"{TensorMeta.of(x)}, or elements that share memory. A program knows tensors and not their memory: "
                "index the tensor that holds the elements."
            )
        self._bind(result, self.value(made))
        return result  # type: ignore[no-any-return]

    def _written(self, x: torch.Tensor, geometry: tuple[Any, ...], source: torch.Tensor) -> torch.Tensor | None:
        """`as_strided_scatter`; None if the view reaches elements that are not elements of `x`."""
        steps = views(x, *geometry)
        found = places(x, *geometry) if steps is None else None
        with torch._C.DisableTorchFunction(), self:
            if steps is not None:
                return write_through(steps, x, source)
            if found is not None:
                return x.reshape(-1).index_put((on_device(found, x),), source.reshape(-1)).view(x.shape)
        return None

    def _read(self, x: torch.Tensor, geometry: tuple[Any, ...]) -> torch.Tensor | None:
        """`as_strided`; None if no tensor with the storage of `x` has all elements of the view."""
        size, stride, offset = geometry
        offset = int(x.storage_offset()) if offset is None else offset
        storage = x.untyped_storage()._cdata
        others = (
            other
            for other, _ in list(self._values.values())
            if isinstance(other, FakeTensor) and other.untyped_storage()._cdata == storage and other.dtype == x.dtype
        )
        holders = [x, *others]
        for holder in holders:
            if (steps := views(holder, size, stride, offset)) is not None:
                with torch._C.DisableTorchFunction(), self:
                    return read_through(steps, holder)
        for holder in holders:
            if (found := places(holder, size, stride, offset)) is not None:
                with torch._C.DisableTorchFunction(), self:
                    flat = holder.reshape(-1)
                    at = flat if in_order(found, flat) else flat.index_select(0, on_device(found, holder))
                    return at.view(size)
        return None

    def _template(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor of the same shape and strides, for a random operator to read: it draws in the strides' order."""
        with self._propagation(), self:
            like = torch.empty_like(tensor)
        with self:
            if like.is_contiguous():
                return torch.empty(like.shape, dtype=like.dtype, device=like.device)
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def _record(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, source: Source | None
    ) -> None:
        name = func._schema.name.split("::")[-1]
        results = []
        for leaf in iterate_leaves(outputs):
            value = None
            if isinstance(leaf, torch.Tensor):
                value = Value(self._namer.fresh(name), TensorMeta.of(leaf))
                self._bind(leaf, value)
            results.append(value)
        if any(results):
            self.operations.append(Operation(func, args, kwargs, tuple(results), source))
            self.regions.note(self.operations[-1])
            if self.observer is not None:
                self.observer.add(self.operations[-1])
        if self.in_no_grad and func is not aten.detach_copy.default:
            for leaf, value in zip(iterate_leaves(outputs), results, strict=True):
                if value is not None:
                    self._record(aten.detach_copy.default, (value,), {}, leaf, source)

    def _note_range(self, func: OpOverload, args: tuple[Any, ...]) -> None:
        """Note that a `record_function` block begins or ends."""
        if "enter" in func._schema.name:
            self._ranges.append(Range(args[0], next(self._numbers)))
        elif self._ranges:
            self._ranges.pop()

    def _handle(self, number: int) -> Handle:
        """The handle that keeps a host function alive as long as the program."""
        if number not in self._handles:
            self._handles[number] = Handle.of(number, len(self._handles))
        return self._handles[number]

    def _bind(self, tensor: torch.Tensor, value: Value) -> None:
        self._values[id(tensor)] = (tensor, value)

    def create_symbolic_nested_int(self, **kwargs: Any) -> Any:
        """The length of rows in a nested tensor that the function makes.

        Raises:
            TraceError: always.
        """
        raise self._nested()

    def _nested(self) -> TraceError:
        return TraceError(f"A tensor at {where(self._source())} is {NESTED}")

    def _constant(self, tensor: torch.Tensor) -> Value:
        if tensor.is_nested:
            raise self._nested()
        if tensor.layout is not torch.strided or tensor.is_quantized:
            found = tensor.layout if tensor.layout is not torch.strided else tensor.dtype
            raise TraceError(
                f"The function closes over a tensor that must be dense (got {found}), at {where(self._source())}. "
                "Close over x.to_dense(), or over x.dequantize()."
            )
        if tensor.is_meta:
            raise without_values(tensor, where(self._source()))
        if hasattr(tensor, "full_tensor"):
            raise TraceError(
                f"The function closes over a {type(tensor).__name__} {TensorMeta.of(tensor)} that cannot be a constant "
                f"of the program, at {where(self._source())}. Pass it as an argument."
            )
        value = Value(self._namer.fresh("constant"), TensorMeta.of(tensor))
        self._bind(tensor, value)
        self.constants[value] = tensor
        return value

    def _symbols(self, tree: Any) -> Any:
        return _map_tensors(
            lambda leaf: number_of(leaf) if isinstance(leaf, torch.SymFloat) else self.value(leaf), tree
        )

    def _lower(self, tree: Any) -> Any:
        return _map_tensors(self._as_fake, tree)

    def _as_fake(self, tensor: Any) -> Any:
        if isinstance(tensor, torch.SymFloat):
            return value_of(tensor)
        return tensor if isinstance(tensor, FakeTensor) else self.lift(tensor)


_BY_STORAGE = frozenset({aten._new_zeros_with_same_feature_meta.default, aten.copy.default})
"""Operators whose results may have more storage than elements, which the cache of fake results forgets."""


_TO_PYTHON = frozenset({aten._local_scalar_dense.default, aten.equal.default})
"""Operators whose results are Python values."""


_SHAPED_BY_NUMBERS = frozenset(
    {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.range.default, aten.range.step}
)
"""Operators whose results have shapes that depend on the values of numbers."""


def _map_tensors(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to the tensors and the traced numbers among arguments."""
    if isinstance(tree, (torch.Tensor, torch.SymFloat)):
        return function(tree)
    if type(tree) in (tuple, list):
        return type(tree)([_map_tensors(function, item) for item in tree])
    if type(tree) is dict:
        return {key: _map_tensors(function, item) for key, item in tree.items()}
    return tuple(tree) if isinstance(tree, torch.Size) else tree


_NUMBER_DTYPES: Mapping[type, torch.dtype] = MappingProxyType(
    {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
)


def _is_number_for_tensor(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether a number is passed for an operator's only tensor, as the derivative of `x * 2j` does to `conj`."""
    parameters = func._schema.arguments
    takes_tensor = bool(args and parameters) and str(parameters[0].type) == "Tensor"
    is_number = bool(args) and (type(args[0]) in _NUMBER_DTYPES or isinstance(args[0], torch.SymFloat))
    return takes_tensor and is_number and not any(isinstance(x, torch.Tensor) for x in args[1:])


def _number_dtype(number: Any) -> torch.dtype:
    return torch.float64 if isinstance(number, torch.SymFloat) else _NUMBER_DTYPES[type(number)]


def _reject_generator(func: OpOverload, kwargs: dict[str, Any], source: Source | None) -> None:
    if kwargs.get("generator") is not None:
        raise TraceError(
            f"{func} at {where(source)} draws from a torch.Generator of its own, and all ranks draw alike from the "
            "default one only. Leave generator= out and call torch.manual_seed, or draw a plain tensor outside of "
            "spmd.jit, and pass it in or distribute it."
        )


def _copy_of_state(source: Source | None) -> str:
    """Advice about an object of an installed package that writes to tensors it holds."""
    if source is None or not is_installed(source.file):
        return ""
    return " Pass an object that writes to its tensors, such as a cache, copy.deepcopy(it) inside, and return the copy."


def _implementation_of_experts(source: Source | None) -> str:
    """Advice about a mixture of experts of an installed package that loops over the experts which are hit."""
    if source is None or not is_installed(source.file) or "expert" not in source.code:
        return ""
    return (
        " For experts of transformers, call model.set_experts_implementation('grouped_mm'), or 'batched_mm', first: it "
        "multiplies by all experts at once."
    )


def _data_dependent(func: OpOverload, error: Exception, source: Source | None) -> TraceError:
    if isinstance(error, DynamicOutputShapeException):
        return TraceError(
            f"The shape of the result of {func} at {where(source)} depends on the values of its tensors, and a program "
            f"has static shapes. {_STATIC_SHAPES.get(func._schema.name.removeprefix('aten::'), _STATIC_SHAPE)}"
            f"{_implementation_of_experts(source)}"
        )
    asked = "" if func is torch.ops.aten._local_scalar_dense.default else f"{func}, "
    return TraceError(
        f"The value of a tensor is needed as a Python number at {where(source)} ({asked}.item(), float(), bool() or "
        "`if` on a tensor), and a traced function has no values. Keep it a tensor (spmd.cond or torch.where instead of "
        "`if`, spmd.while_loop for `while`, spmd.fori_loop for range(), a mask torch.arange(n) < i for x[:i], "
        "num_classes= for one_hot), or pass the number with static_argnums."
    )


def needs_values(error: TraceError) -> bool:
    """Test for a refusal because a result, or its shape, needs values."""
    cause = error.__context__
    return isinstance(cause, (DataDependentOutputException, DynamicOutputShapeException)) or _is_unknown(cause)


def _is_unknown(error: BaseException | None) -> bool:
    """Test for the error of an operator without a fake implementation."""
    return isinstance(error, UnsupportedOperatorException) or "no fake impl registered" in str(error)


def _of_own(func: OpOverload) -> str:
    """What to do about an operator that torch cannot compute on fake tensors."""
    if func.namespace in ("aten", "prims"):
        return "Use another operator, or compute it outside of the function."
    return f"Register a fake implementation of your operator: @torch.library.register_fake({func._schema.name!r})."


_STATIC_SHAPE = "Use torch.where or a mask of fixed shape."
_SORTED = "Equal values are neighbours in x.sort().values; or find the unique ones outside and pass them in."
_STATIC_SHAPES: Mapping[str, str] = {
    "nonzero": "Use torch.where(mask, x, 0), or torch.nonzero_static(x, size=...) for a fixed number of places.",
    "masked_select": "Use torch.where(mask, x, 0), and mask.sum() for how many there are.",
    "index": "Use torch.where(mask, x, 0) instead of x[mask], and mask.sum() for how many there are.",
    "unique_consecutive": _SORTED,
    "unique_dim": _SORTED,
    "_unique": _SORTED,
    "_unique2": _SORTED,
    "repeat_interleave": "Pass output_size=..., the sum of the repeats.",
    "bincount": "Use torch.nn.functional.one_hot(index, n).sum(0), or torch.zeros(n).index_add(0, index, weights).",
    "linalg_lstsq": "Use torch.linalg.pinv(A) @ B, or torch.linalg.qr(A) and torch.linalg.solve_triangular.",
}
"""Advice for the error message, for operators whose result shapes depend on values."""
