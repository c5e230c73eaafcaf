"""What ranks compare before every call of a jitted function under `spmd.init(check="calls")`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import attrs
import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from spmd.api.signature import Signature
from spmd.api.values.dtensor import DTensor
from spmd.api.values.leaves import DYNAMIC
from spmd.collectives.distributed.agreement import (
    difference,
    failing_together,
    gather,
    gather_with_replicas,
    known,
    places,
)
from spmd.collectives.distributed.checksums import checksums
from spmd.collectives.distributed.history import History, history
from spmd.collectives.distributed.replicas import Replica, digest_of, replicated_axes
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.core.static_key import stable_text, static_text
from spmd.errors import DivergenceError
from spmd.job.user_code import user_line
from spmd.runtime.agreement import SAME_GENERATOR, generator_digest
from spmd.runtime.torch_settings import isolated
from spmd.tracing.traced import name_of

SAME_CALL = (
    "All ranks must call the same functions, with the same static arguments and with arguments of the same shapes, "
    "dtypes and specs, in the same order."
)
SAME_TENSOR = (
    "Every rank must pass the same whole tensor. To take one rank's, spmd.distribute(..., src_rank=0); where each rank "
    "has its own part, spmd.from_process_data(...)."
)
SAME_REPLICA = (
    "Ranks must hold equal replicas. Look for what changes them on one rank, such as writes to shards or a step more, "
    "or place the value again: spmd.distribute(x.full_tensor(), spec, src_rank=0)."
)


@attrs.frozen
class _CallTexts:
    """What a rank says of a call where ranks differ: each a mapping from names to texts.

    Args:
        signature: the function, its static arguments, and all of its arguments but their values.
        function: the number of the function, if ranks have compared a call of it before.
        tensors: the checksums of plain arguments.
        generator: the state of the generator, if the function draws.
        line: where the call is.
    """

    signature: dict[str, str]
    function: dict[str, str]
    tensors: dict[str, str]
    generator: dict[str, str]
    line: str


class CallCheck:
    """Compares the calls of a compiled function with those that the other ranks make.

    Args:
        function: the user's function.
        signature: what its calls have in common.
        in_specs: the spec of each leaf of the arguments.
        is_random: whether it draws random numbers; traces it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        signature: Signature,
        in_specs: Sequence[DTensorSpec],
        is_random: Callable[[], bool],
    ) -> None:
        self._function, self._signature, self._in_specs, self._is_random = function, signature, in_specs, is_random
        self._paths = signature.tensors(signature.paths)
        self._number: tuple[History, int] | None = None

    def __call__(self, leaves: Sequence[Any], numbers: Sequence[float] = ()) -> None:
        """Compare a call with those that the other ranks make; on a distributed mesh a collective call.

        Args:
            leaves: the tensors among the flattened arguments.
            numbers: the dynamic numbers among them.

        Raises:
            DivergenceError: on every rank, if the calls differ: the function, its static arguments, the shapes, dtypes
                and specs of its arguments, plain tensors, replicas of DTensors, or the generator of a function that
                draws.
            SpmdError: a rank failed, or never makes the call.
        """
        mesh, name, line = self._signature.mesh, name_of(self._function), user_line()
        job = history(mesh.ranks)
        call = f"call {job.calls + 1} of jitted functions, {name} on {mesh}"
        with failing_together(call, mesh), isolated():
            number = self._number[1] if self._number and self._number[0] is job else None
            tensors, replicas = self._values(leaves)
            usual = number is not None and self._is_usual(leaves, tensors)
            every_path = self._signature.paths
            for position, value in zip(self._signature.numbers, numbers, strict=True):
                tensors[f"Argument {every_path[position]}"] = f"the number {value!r}"
            signature = {} if usual else self._describe(leaves)
            generator = {}
            if number is not None and self._is_random():  # in the first call, programs are compared with generators
                generator[f"The random generator before {name}"] = generator_digest(mesh)
            said = digest_of(repr((number, signature, tensors, generator)))
        every, drifted = gather_with_replicas(call, said, mesh, replicas)
        if len(set(every)) > 1:
            function = {} if number is None else {f"The function of the name {name}": f"number {number + 1}"}
            mine = _CallTexts(signature or self._describe(leaves), function, tensors, generator, line)
            _refuse(call, dict(zip(mesh.ranks, gather(call, mine, mesh.ranks), strict=True)))
        if drifted is not None:
            raise known(DivergenceError(f"In {call}, {drifted}. {SAME_REPLICA}"))
        job.calls += 1
        if number is None:
            self._number = job, job.number_function()

    def _is_usual(self, leaves: Sequence[Any], tensors: Mapping[str, str]) -> bool:
        """Whether all leaves are plain tensors, described already, or DTensors with the specs of the function."""
        plain = len(tensors)
        for leaf, spec in zip(leaves, self._in_specs, strict=True):
            if isinstance(leaf, DTensor):
                if leaf._spec != spec:
                    return False
                plain += 1
        return plain == len(leaves)

    def _describe(self, leaves: Sequence[Any]) -> dict[str, str]:
        """What a call is, but for the values of tensors, in words that are the same in every process."""
        signature, function = self._signature, self._function
        code = getattr(inspect.unwrap(function), "__code__", None)
        place = f" at {os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code else ""
        return {
            "The function": f"{stable_text(function)}{place}",
            **{f"Static argument {signature.layout.labels[n]}": static_text(key) for n, key in signature.static},
            "The structure of the arguments": str(signature.tree),
            **{
                f"Argument {path}": _text(leaf, meta)
                for path, leaf, meta in zip(self._paths, leaves, signature.metas, strict=True)
            },
            **{
                f"The spec of argument {path}": str(spec)
                for path, spec in zip(self._paths, self._in_specs, strict=True)
            },
            **{
                f"Argument {signature.paths[position]}": "a number" if key == DYNAMIC else static_text(key)
                for position, key in signature.others
            },
            "What torch is set to (autocast, default dtype, modes, ...)": stable_text(signature.settings),
        }

    def _values(self, leaves: Sequence[Any]) -> tuple[dict[str, str], list[Replica]]:
        """The checksums of plain arguments, and those of the shards that other ranks hold too."""
        mesh, plain, shards = self._signature.mesh, {}, []
        for path, leaf in zip(self._paths, leaves, strict=True):
            name = f"Argument {path}"
            if isinstance(leaf, DTensor):
                if axes := replicated_axes(mesh, leaf._spec):
                    shards.append((name, axes, leaf._shards[0]))
            elif isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not _is_abstract(leaf):
                plain[name] = leaf
        sums = iter(checksums([*plain.values(), *(shard for _, _, shard in shards)]))
        texts = {name: f"{TensorMeta.of(leaf)} with digest {next(sums):08x}" for name, leaf in plain.items()}
        return texts, [Replica(name, axes, f"a shard with digest {next(sums):08x}") for name, axes, _ in shards]


def _text(leaf: Any, meta: TensorMeta | None) -> str:
    """An argument, but for its values."""
    if isinstance(leaf, DTensor):
        return str(leaf._spec)
    return f"a plain {meta}{' without data' if isinstance(leaf, torch.Tensor) and leaf.is_meta else ''}"


def _is_abstract(leaf: torch.Tensor) -> bool:
    """Whether a tensor has no bytes of its own: a meta tensor, or one on which a transform acts."""
    return leaf.is_meta or is_functorch_wrapped_tensor(leaf)


def _refuse(call: str, every: Mapping[int, _CallTexts]) -> NoReturn:
    """Raise the error of a call that differs between ranks."""
    lines = places({rank: said.line for rank, said in every.items()})
    for part, expected in (
        ("signature", SAME_CALL),
        ("function", SAME_CALL),
        ("tensors", SAME_TENSOR),
        ("generator", SAME_GENERATOR),
    ):
        if found := difference({rank: getattr(said, part) for rank, said in every.items()}):
            raise known(DivergenceError(f"In {call}, at {lines}: {found}. {expected}"))
    raise known(DivergenceError(f"{call}, at {lines}, differs between ranks. {SAME_CALL}"))
