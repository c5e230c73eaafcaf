"""Results of loops and branches as new values: writing to one changes nothing else, as in a function under `jit`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._C._functorch import TransformType, peek_interpreter_stack

from spmd.api.control_flow.predicates import is_batched
from spmd.api.eager.families import view_of
from spmd.api.values.dtensor import DTensor
from spmd.tracing.active_transforms import unwrapped
from spmd.tracing.overlapping import repeats_memory

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def new_values(results: Sequence[Tensor], operands: Iterable[object]) -> list[Tensor]:
    """The results, of which those are copies that are in the memory of an operand, or of another result.

    One of which several elements share memory, as `expand` makes them, is a copy, too: a write would change all.
    Under vmap, what has no batch stays what it is: a branch has no batch where both sides return the same tensor.
    """
    around = peek_interpreter_stack()
    is_mapped = around is not None and around.key() == TransformType.Vmap
    used = {memory for operand in operands if isinstance(operand, Tensor) for memory in _memory(operand)}
    found = []
    for result in results:
        memory = _memory(result)
        stays = (used.isdisjoint(memory) and not _repeats(result)) or (is_mapped and not is_batched(result))
        found.append(result if stays else result.clone())
        used |= memory
    return found


def _repeats(tensor: Tensor) -> bool:
    held = unwrapped(tensor)
    return held.layout is torch.strided and not isinstance(held, DTensor) and repeats_memory(held)


def _memory(tensor: Tensor) -> set[int]:
    """What identifies the memory of a tensor; of one that a trace has made, the tensor itself."""
    held = unwrapped(tensor)
    if isinstance(held, DTensor):
        base = held if (view := view_of(held)) is None else view.base
        return {id(base), id(base._family or base)}
    found = {id(held)}
    if type(held) in _PLAIN and not torch._is_functional_tensor(held):
        with contextlib.suppress(NotImplementedError):  # by sparse tensors, and transforms of another thread
            found.add(held.untyped_storage()._cdata)
    return found
