"""Containers as users and other packages write them: dataclasses, and classes that torch's pytrees know."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, UserDict
from typing import Any

import attrs
import torch
from torch.utils import _pytree as torch_pytree


class Kind(enum.Enum):
    LEFT = 1
    RIGHT = 2


@dataclasses.dataclass
class State:
    params: Any
    step: int = 0
    mask: Any = None
    kind: Kind = Kind.LEFT


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    w: Any
    sizes: Any = ()
    total: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.w, torch.Tensor):
            raise TypeError(f"w must be a tensor (got {type(self.w).__name__}).")
        object.__setattr__(self, "total", self.w.sum())


@attrs.frozen
class Fields:
    w: Any
    name: str = "fields"


class Output(OrderedDict):
    """As transformers' ModelOutput: an ordered dict without the fields that are None, known to torch's pytrees."""

    def __init__(self, loss: Any = None, hidden: Any = None) -> None:
        super().__init__((name, x) for name, x in (("loss", loss), ("hidden", hidden)) if x is not None)

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


torch_pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, names: Output(**dict(zip(names, values, strict=True))),
    flatten_with_keys_fn=torch_pytree._dict_flatten_with_keys,
)


@dataclasses.dataclass
class Pair:
    """A dataclass that torch's pytrees know, with the children in another order than its fields."""

    first: Any
    second: Any
    flag: bool = False


torch_pytree.register_pytree_node(
    Pair,
    lambda pair: ([pair.second, pair.first], {"flag": pair.flag}),
    lambda values, context: Pair(values[1], values[0], **context),
)


@dataclasses.dataclass
class Registered:
    """A dataclass that is registered by torch's function for dataclasses."""

    first: Any
    second: Any
    third: Any = None


torch_pytree.register_dataclass(Registered)


class Encoding(UserDict):
    """As transformers' BatchEncoding, whose other attributes are of one batch."""

    def __init__(self, data: Any = None, encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings


class Layer:
    """As a layer of transformers' DynamicCache: what torch would call to make one computes with its tensors."""

    def __init__(self) -> None:
        self.keys = None
        self.is_initialized = False

    def update(self, keys: torch.Tensor) -> None:
        self.keys = torch.cat([self.keys, keys]) if self.is_initialized else keys
        self.is_initialized = True


class Cache:
    def __init__(self) -> None:
        self.layers: list[Any] = []


for kind, name in ((Layer, "CacheLayerMixin"), (Cache, "Cache")):
    kind.__module__, kind.__name__ = "transformers.cache_utils", name


class Unknown:
    def __init__(self, w: Any) -> None:
        self.w = w


class Batch:
    """As TensorDict: tensors by name, and a batch size that comes back with them."""

    def __init__(self, tensors: dict[str, Any], batch_size: tuple[int, ...]) -> None:
        self.tensors, self.batch_size = tensors, batch_size

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]


torch_pytree.register_pytree_node(
    Batch,
    lambda batch: (list(batch.tensors.values()), {"names": list(batch.tensors), "batch_size": batch.batch_size}),
    lambda values, context: Batch(dict(zip(context["names"], values, strict=True)), context["batch_size"]),
)
