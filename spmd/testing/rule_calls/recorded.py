"""The calls of operators that torch's operator database makes through this package, forward and backward."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from spmd.canonicalize import canonicalize
from spmd.errors import SpmdError
from spmd.graph import Graph, Operation, Value, freeze, iterate_leaves, map_leaves
from spmd.rules import find_rule
from spmd.spec import TensorMeta
from spmd.testing.op_sweep.cases import Case, cases
from spmd.testing.rule_calls.draws import Calls
from spmd.trace import trace_flat

_LARGEST = 130
"""Elements of the largest tensor of a call that is kept: 5 by 5 by 5 is the database's usual cube."""

Named: TypeAlias = tuple[str, str, Sequence[Any], Mapping[str, Any]]
"""The operator's name, the call's signature, its arguments and keyword arguments."""


def record(entry: Any, samples: int = 2) -> bytes:
    """The calls of operators with rules that the first samples of an entry make, one a signature, as bytes.

    Tensors that are sent between processes as such share memory, with a file descriptor each.
    """
    found: dict[tuple[str, str], Named] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in _cases(entry, samples):
            try:
                graph = canonicalize(trace_flat(case.function, case.tensors), lambda op: find_rule(op) is None)
                for name, signature, args, kwargs in _calls(graph, case.tensors):
                    found.setdefault((name, signature), (name, signature, args, kwargs))
            except (SpmdError, RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError):
                continue  # what cannot be traced or run is the sweep's concern
    buffer = io.BytesIO()
    torch.save(list(found.values()), buffer)
    return buffer.getvalue()


def recall(recorded: bytes) -> list[Named]:
    """What `record` gave."""
    calls: list[Named] = torch.load(io.BytesIO(recorded), weights_only=False)
    return calls


def _cases(entry: Any, samples: int) -> Iterator[Case]:
    for backward in (False, True):
        try:
            yield from cases(entry, samples, backward)
        except Exception:  # the database's own samples may need what is not there
            return


def _calls(graph: Graph, inputs: Sequence[torch.Tensor]) -> Iterator[Named]:
    """The calls of a program on given inputs, with the tensors that each gets."""
    values = dict(graph.constants) | dict(zip(graph.inputs, inputs, strict=True))
    for operation in graph.operations:
        args, kwargs = (_concrete(tree, values) for tree in (operation.args, dict(operation.kwargs)))
        with torch.no_grad():
            results = list(iterate_leaves(operation.op(*args, **kwargs)))
        values |= {value: result for value, result in zip(operation.results, results, strict=True) if value is not None}
        if _is_wanted(operation):
            yield str(operation.op), signature(args, kwargs), args, kwargs


def _concrete(tree: Any, values: Mapping[Value, torch.Tensor]) -> Any:
    return map_leaves(lambda leaf: values[leaf].contiguous().clone() if isinstance(leaf, Value) else leaf, tree)


def _is_wanted(operation: Operation) -> bool:
    metas = [value.meta for value in (*operation.operands, *operation.tensors)]
    small = all(0 < meta.numel <= _LARGEST and not _rounds(meta.dtype) for meta in metas)
    return small and not operation.draws and find_rule(operation.op) is not None


def _rounds(dtype: torch.dtype) -> bool:
    """Whether numbers are too short for the parts of a sum to add up."""
    return (dtype.is_floating_point and dtype.itemsize < 4) or (dtype.is_complex and dtype.itemsize < 8)


def signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What rules see of a call, as text: equal for calls that differ in values only."""
    meta = lambda leaf: TensorMeta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
    return str(freeze((map_leaves(meta, tuple(args)), map_leaves(meta, dict(kwargs)))))


def select(recorded: Iterable[Named], limit: int) -> dict[torch._ops.OpOverload, Calls]:
    """At most `limit` calls of each operator, of as many kinds as there are: numbers of dims, dtypes, options."""
    by_op: dict[str, dict[str, Named]] = {}
    for call in recorded:
        by_op.setdefault(call[0], {}).setdefault(call[1], call)
    return {operator(name): _spread(list(calls.values()), limit) for name, calls in sorted(by_op.items())}


def _spread(calls: Sequence[Named], limit: int) -> Calls:
    kinds: dict[str, list[Named]] = {}
    for call in sorted(calls, key=lambda call: call[1]):
        kinds.setdefault(_kind(call), []).append(call)
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*kinds.values()))
    return [(call[2], call[3]) for call in itertools.islice(filter(None, rounds), limit)]


def _kind(call: Named) -> str:
    kind = lambda leaf: (leaf.ndim, leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)  # noqa: E731
    return str((map_leaves(kind, tuple(call[2])), map_leaves(kind, dict(call[3]))))


def operator(name: str) -> torch._ops.OpOverload:
    """The operator of a name, as `aten.add.Tensor`."""
    namespace, packet, overload = name.split(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found
