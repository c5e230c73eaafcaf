"""What a DTensor is apart from its moves: a tensor without storage that has a spec and shards.

How it is shown and saved, what it refuses, and how its parts are replaced.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeAlias

import torch
from torch._tensor_str import _tensor_str

from spmd.api.values.checkpointable import read_chunks, shard_at, write_items
from spmd.core.mesh import Runtime
from spmd.core.shards import join
from spmd.core.spec import DTensorSpec
from spmd.errors import ShardingError
from spmd.tracing.source import where as place_text

Shards: TypeAlias = tuple[torch.Tensor, ...]
"""The shards of a tensor that this process holds, in rank order."""

SHARD = "_shard_"
"""The shards are attributes, too, for tools that take a tensor apart: this and their number."""


def require_shards(x: Wrapper) -> None:
    """Check that a DTensor has its shards, and wait for those in flight; ShardingError if it was donated."""
    _ = x._shards


class Wrapper(torch.Tensor):
    """The base of `DTensor`: what needs only its spec and its shards."""

    __slots__ = ("_gone", "_maker", "_shards", "_spec")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _spec: DTensorSpec
    _shards: Shards
    _gone: tuple[str, str]  # why it has no shards, if it was not donated: in a word, and what to do
    _maker: object | None  # what may use it again; None if anything but its shards was changed

    def __getattr__(self, name: str) -> Any:  # only for attributes that are missing
        if name == "_shards":
            if finish := self.__dict__.get("_in_flight"):
                replace_shards(self, finish())
                del self.__dict__["_in_flight"]
                return self._shards
            raise ShardingError(f"A DTensor {self._spec} was read at {place_text()}, after {self._gone[1]}")
        if name == "_gone":
            return DONATED
        if name.startswith(SHARD) and name[len(SHARD) :].isdigit() and int(name[len(SHARD) :]) < len(self._shards):
            return self._shards[int(name[len(SHARD) :])]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch's is untyped
        if not _holds_shards(self):
            why = "in flight" if "_in_flight" in self.__dict__ else self._gone[0]
            return f"DTensor({self._spec} on {self._spec.mesh}, {why})"
        shapes = [f"[{','.join(map(str, shard.shape))}]" for shard in self._shards]
        counts = [(shape, len(list(group))) for shape, group in itertools.groupby(shapes)]
        shown = " ".join(shape if count == 1 else f"{count}x{shape}" for shape, count in counts)
        return f"DTensor({self._spec} on {self._spec.mesh}, shards {shown})"

    def __str__(self) -> str:
        """The values as torch shows them, with the spec; the shard of this process where they would have to be sent."""
        if not _holds_shards(self) and "_in_flight" not in self.__dict__:
            return repr(self)
        if self._spec.mesh.runtime is Runtime.VIRTUAL:
            held, which = join(self._shards, self._spec), ""
        else:
            rank = self._spec.mesh.rank(self._spec.mesh.held_coordinates[0])
            held, which = self._shards[0], "" if self._spec.is_replicated else f"shard {rank} of "
        return f"DTensor({_tensor_str(held, len('DTensor('))}, {which}{self._spec} on {self._spec.mesh})"

    def _repr_html_(self) -> str:
        return self._spec.picture.titled(repr(self))._repr_html_()

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if format_spec else str(self)

    # The protocol `_Checkpointable`, by which torch.distributed.checkpoint saves a tensor or loads it in place.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self._spec, self._spec.mesh.held_coordinates, self._shards)

    def __create_chunk_list__(self) -> list[Any]:
        return read_chunks(self._spec, self._spec.mesh.held_coordinates)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return shard_at(self._spec, self._spec.mesh.held_coordinates, self._shards, index)

    # These methods of torch.Tensor read storage or autograd state, which a DTensor does not have, without an operator
    # that __torch_dispatch__ would see; share_memory_ would even crash the interpreter.

    def _refuse(self, *args: object, method: str, remedy: str, **kwargs: object) -> NoReturn:
        raise ShardingError(f"{method}() was called on {self!r}. {remedy}")

    _READ = "Take the whole tensor first: .full_tensor()."
    __dlpack__ = functools.partialmethod(_refuse, method="__dlpack__", remedy=_READ)
    data_ptr = functools.partialmethod(_refuse, method="data_ptr", remedy=_READ)
    storage = functools.partialmethod(_refuse, method="storage", remedy=_READ)
    share_memory_ = functools.partialmethod(_refuse, method="share_memory_", remedy=_READ)


set_spec: Callable[[Wrapper, DTensorSpec], None] = Wrapper.__dict__["_spec"].__set__
replace_shards: Callable[[Wrapper, Shards], None] = Wrapper.__dict__["_shards"].__set__
"""Give a DTensor other shards that fit its spec."""
delete_shards: Callable[[Wrapper], None] = Wrapper.__dict__["_shards"].__delete__
set_maker: Callable[[Wrapper, object | None], None] = Wrapper.__dict__["_maker"].__set__
_set_gone = Wrapper.__dict__["_gone"].__set__


def set_attribute(value: Wrapper, name: str, content: object) -> None:
    """Set a private attribute, faster than `__setattr__` does."""
    value.__dict__[name] = content
    set_maker(value, None)


def _holds_shards(value: Wrapper) -> bool:
    try:
        Wrapper.__dict__["_shards"].__get__(value)
    except AttributeError:
        return False
    return True


def lose_shards(values: Iterable[Wrapper], why: tuple[str, str]) -> None:
    """Drop the shards of DTensors; reading them is an error.

    Args:
        values: the DTensors; some may have lost their shards already.
        why: what they are from then on, in their `repr`; and for the error: what happened, and what to do.
    """
    for value in values:
        try:
            delete_shards(value)
        except AttributeError:
            continue
        _set_gone(value, why)


def donate_shards(values: Iterable[Wrapper]) -> None:
    """As `lose_shards`, to a jitted function; plain tensors among the values keep what they hold."""
    waiting = iter(values)
    while True:
        try:
            deque(map(delete_shards, waiting), maxlen=0)
            return
        except (AttributeError, TypeError):  # one that is given twice, or a plain tensor
            continue


DONATED = (
    "donated",
    "it was donated to a jitted function. Use what the function returned, or leave the argument out of donate_argnums.",
)
"""Why a donated DTensor has no shards."""
