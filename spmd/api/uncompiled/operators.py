"""The modes in which a rank's function runs uncompiled: they run the primitives, and record types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.api.uncompiled.values import RankTrace
from spmd.collectives.host import HOST_PRINT
from spmd.collectives.local import LOCALS, run_local
from spmd.collectives.manual import ENTER, LEAVE
from spmd.collectives.primitives import COLLECTIVES
from spmd.collectives.resharding import redistribution
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.core.spec_text import parse_spec
from spmd.ir.list_operators import list_decomposition
from spmd.ir.operator_kinds import is_composite
from spmd.tracing.linearize import RecordingError, recorder
from spmd.tracing.source import where


class RankOperators(TorchDispatchMode):
    """Runs every operator of one rank's function.

    Args:
        trace: what is known of its tensors.
    """

    def __init__(self, trace: RankTrace) -> None:
        super().__init__()
        self._trace, self._rank = trace, trace.rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        self._rank.check_runs()
        if recorder():
            raise RecordingError(f"{func} was called while make_fx records, at {where(self._rank.source)}.")
        kwargs = kwargs or {}
        body = None if func._schema.is_mutable else list_decomposition(func)
        body = func.decompose if is_composite(func) else body
        if body is not None:
            with self:
                return body(*args, **kwargs)
        if func is HOST_PRINT:
            return self._rank.collective(func, args)
        before = self._trace.values_of(args, kwargs)
        outputs = self._run(func, args, kwargs)
        self._trace.record(func, before, outputs, self._rank.source)
        return outputs

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in (ENTER, LEAVE):
            return self._move(func, *args)
        if func in COLLECTIVES:
            return self._rank.collective(func, args)
        if func in LOCALS:
            return run_local(func, self._rank.mesh, self._rank.number, *args).clone()
        return func(*args, **kwargs)

    def _move(
        self, op: Any, x: Tensor, spec: str, _: Sequence[str], __: Sequence[str], ___: Sequence[int], shape: list[int]
    ) -> Tensor:
        """The shard of a global value that every rank holds whole, or the global value of which it holds a shard."""
        mesh = self._rank.mesh
        meta = TensorMeta.of(x) if op is ENTER else TensorMeta(tuple(shape), x.dtype)
        whole, sharded = (DTensorSpec.make(mesh, found, meta) for found in (P(), parse_spec(spec)))
        for step in redistribution(*((whole, sharded) if op is ENTER else (sharded, whole))):
            x = self._run(step.primitive.op, (x, *step.arguments(self._rank.coordinate)), {})
        return x.clone()


class BackwardPasses(TorchFunctionMode):
    """Runs backward passes with the axes of bodies that have ended: functions of them run there.

    Args:
        trace: what is known of the rank's tensors.
    """

    def __init__(self, trace: RankTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        if func is not torch.autograd.grad:
            return func(*args, **(kwargs or {}))
        with self._trace.in_backward():
            return func(*args, **(kwargs or {}))
