"""The calls of operators that torch's operator database makes through this package, forward and backward."""

from __future__ import annotations

import copyreg
import io
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from proofs.op_sweep.cases import Case, cases
from proofs.rule_calls.draws import Calls
from spmd.core.spec import TensorMeta
from spmd.errors import SpmdError
from spmd.ir.graph import Graph, Operation, Value, freeze, iterate_leaves, map_leaves
from spmd.rules import find_rule
from spmd.tracing.canonicalize.canonicalize import canonicalize
from spmd.tracing.trace import trace_flat

_LARGEST = 130
"""The most elements of a tensor of a call that rules are checked on: the database often has tensors of 5 by 5 by 5."""

_KEPT = 5000
"""The most elements of a tensor of a call that is recorded."""


@attrs.frozen(eq=False)
class Recorded:
    """A call of an operator; `provable` tells whether its operator's rule can be checked on it."""

    op: torch._ops.OpOverload
    signature: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    provable: bool


def record(entry: Any, samples: int = 2) -> bytes:
    """The calls of operators that the first samples of an entry make, one per signature, as bytes.

    They are bytes because each tensor sent between processes uses shared memory and a file descriptor.
    """
    found: dict[tuple[str, str], Recorded] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in _cases(entry, samples):
            try:
                graph = canonicalize(trace_flat(case.function, case.tensors), lambda op: find_rule(op) is None)
                for call in _calls(graph, case.tensors):
                    found.setdefault((str(call.op), call.signature), call)
            except (SpmdError, RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError):
                continue  # the sweep reports calls that cannot be traced or run
    buffer = io.BytesIO()
    torch.save([(str(c.op), c.signature, c.args, c.kwargs, c.provable) for c in found.values()], buffer)
    return buffer.getvalue()


def recall(recorded: bytes) -> list[Recorded]:
    """The calls from the bytes of `record`."""
    calls = torch.load(io.BytesIO(recorded), weights_only=False)
    return [Recorded(operator(name), *rest) for name, *rest in calls]


def _memory_format(text: str) -> torch.memory_format:
    return getattr(torch, text.removeprefix("torch."))  # type: ignore[no-any-return]


copyreg.pickle(torch.memory_format, lambda found: (_memory_format, (str(found),)))  # torch's own pickling fails


def _cases(entry: Any, samples: int) -> Iterator[Case]:
    for backward in (False, True):
        try:
            yield from cases(entry, samples, backward)
        except Exception:  # the database's own samples may need packages that are not installed
            return


def _calls(graph: Graph, inputs: Sequence[torch.Tensor]) -> Iterator[Recorded]:
    """The calls of a program on given inputs, with the tensors that each gets."""
    values = dict(graph.constants) | dict(zip(graph.inputs, inputs, strict=True))
    for operation in graph.operations:
        args, kwargs = (_concrete(tree, values) for tree in (operation.args, dict(operation.kwargs)))
        with torch.no_grad():
            results = list(iterate_leaves(operation.op(*args, **kwargs)))
        values |= {value: result for value, result in zip(operation.results, results, strict=True) if value is not None}
        provable = _is_provable(operation)
        if provable or _is_kept(operation):
            yield Recorded(operation.op, signature(args, kwargs), args, kwargs, provable)


def _concrete(tree: Any, values: Mapping[Value, torch.Tensor]) -> Any:
    return map_leaves(lambda leaf: values[leaf].contiguous().clone() if isinstance(leaf, Value) else leaf, tree)


def _is_kept(operation: Operation) -> bool:
    metas = [value.meta for value in (*operation.operands, *operation.tensors)]
    return bool(operation.operands) and all(0 < meta.numel <= _KEPT for meta in metas)


def _is_provable(operation: Operation) -> bool:
    """Whether a rule can be checked on a call: it is small, in a precise dtype, and not random."""
    metas = [value.meta for value in (*operation.operands, *operation.tensors)]
    small = all(0 < meta.numel <= _LARGEST and not _rounds(meta.dtype) for meta in metas)
    return small and not operation.is_random and find_rule(operation.op) is not None


def _rounds(dtype: torch.dtype) -> bool:
    """Whether a dtype is too imprecise for partial sums to add up."""
    return (dtype.is_floating_point and dtype.itemsize < 4) or (dtype.is_complex and dtype.itemsize < 8)


def signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """All of a call but its values, as text: equal for calls that differ in tensor values only."""
    meta = lambda leaf: TensorMeta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
    return str(freeze((map_leaves(meta, tuple(args)), map_leaves(meta, dict(kwargs)))))


def select(recorded: Iterable[Recorded], limit: int) -> dict[torch._ops.OpOverload, Calls]:
    """At most `limit` calls of each operator, taken in turns by their numbers of dims, dtypes and options."""
    by_op: dict[str, dict[str, Recorded]] = {}
    for call in recorded:
        by_op.setdefault(str(call.op), {}).setdefault(call.signature, call)
    return {operator(name): _spread(list(calls.values()), limit) for name, calls in sorted(by_op.items())}


def _spread(calls: Sequence[Recorded], limit: int) -> Calls:
    kinds: dict[str, list[Recorded]] = {}
    for call in sorted(calls, key=lambda call: call.signature):
        kinds.setdefault(_kind(call), []).append(call)
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*kinds.values()))
    return [(call.args, call.kwargs) for call in itertools.islice(filter(None, rounds), limit)]


def _kind(call: Recorded) -> str:
    kind = lambda leaf: (leaf.ndim, leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)  # noqa: E731
    return str((map_leaves(kind, tuple(call.args)), map_leaves(kind, dict(call.kwargs))))


def operator(name: str) -> torch._ops.OpOverload:
    """The operator of a name such as `aten.add.Tensor`."""
    namespace, packet, overload = name.split(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found
