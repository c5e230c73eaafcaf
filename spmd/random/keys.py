"""Keys: what a draw depends on, beside the index of an element; JAX's typed keys.

A key is a container of one tensor of integers, so it can be an argument or a result of a program, a carry of a loop, or
closed over. It is no tensor itself: there is no arithmetic on keys, of which draws could depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import optree
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from spmd.core.containers import NAMESPACE
from spmd.core.value_types import is_integer
from spmd.errors import SpmdError
from spmd.job.user_code import user_line
from spmd.random.generators.draw import DERIVE_KEY
from spmd.random.generators.implementations import GENERATORS
from spmd.random.uses import Uses

DEFAULT_IMPL: Final = "philox4x32"

_OPERATORS = (
    "add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and rand or ror "
    "xor rxor lshift rlshift rshift rrshift neg pos abs invert lt le gt ge bool int float index array"
)


class Key:
    """A key, or an array of keys; `spmd.random.key` makes one.

    An array has the items, the length and the iterator of one of tensors: `first, second = spmd.random.split(key)`.

    >>> Key(torch.tensor([[0, 1], [0, 2]]), "philox4x32")[1]
    Key((), 'philox4x32')
    """

    __slots__ = ("_data", "_impl", "_uses")

    def __init__(self, data: Tensor, impl: str) -> None:
        self._data, self._impl, self._uses = data, impl, Uses()

    @property
    def data(self) -> Tensor:
        """The numbers of the keys, i64[keys..., 2]."""
        return self._data

    @property
    def impl(self) -> str:
        """The name of the generator."""
        return self._impl

    @property
    def uses(self) -> Uses:
        """The record of what has used the key, for `check_keys`."""
        return self._uses

    @property
    def shape(self) -> torch.Size:
        """The shape of an array of keys; `()` of one key."""
        return self._data.shape[:-1]

    @property
    def ndim(self) -> int:
        """The number of dims of an array of keys."""
        return self._data.ndim - 1

    @property
    def size(self) -> int:
        """The number of keys."""
        return self.shape.numel()

    def reshape(self, *shape: int | tuple[int, ...]) -> Key:
        """The keys in an array of another shape, of which one length may be -1.

        >>> split(key(0), 6).reshape(2, -1)
        Key((2, 3), 'philox4x32')
        """
        sizes: Any = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if math.prod(sizes) != self.size and sizes.count(-1) != 1:
            raise SpmdError(f"{self.size} keys do not fill an array of the shape {tuple(sizes)} ({user_line()}).")
        return Key(self._data.reshape(*sizes, 2), self.impl)

    def __len__(self) -> int:
        if not self.ndim:
            raise SpmdError(
                f"A single key has no length ({user_line()}). Make an array of keys: spmd.random.split(key)."
            )
        return len(self._data)

    if TYPE_CHECKING:  # items are found one by one: optimizers take what has this method for a list in their states

        def __iter__(self) -> Iterator[Key]: ...

    def __getitem__(self, index: Any) -> Key:
        if not self.ndim:
            raise SpmdError(
                f"A single key has no items ({user_line()}). Make an array of keys: spmd.random.split(key)."
            )
        items = index if isinstance(index, tuple) else (index,)
        found = Key(self._data[(*items, slice(None)) if Ellipsis in items else (*items, ..., slice(None))], self.impl)
        found._uses = self._uses.of_item(items, self.shape)
        return found

    def __eq__(self, other: object) -> Any:
        """Compare keys one by one, as a tensor of booleans."""
        if not isinstance(other, Key) or other.impl != self.impl:
            return NotImplemented
        return (self._data == other._data).all(-1)

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return Key, (self._data, self._impl)

    def __repr__(self) -> str:
        return f"Key({tuple(self.shape)}, {self.impl!r})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Join keys by `torch.stack` and `torch.cat`; refuse torch's other functions."""
        if function in (torch.stack, torch.cat):
            return _joined(function, *args, **(kwargs or {}))
        _refuse(getattr(function, "__name__", str(function)))


def _joined(function: Any, keys: Sequence[Key], dim: int = 0) -> Key:
    impls = {key.impl if isinstance(key, Key) else type(key).__name__ for key in keys}
    if len(impls) > 1:
        raise SpmdError(
            f"torch.{function.__name__} at {user_line()} joins keys of one generator (got {', '.join(sorted(impls))})."
        )
    return Key(function([key.data for key in keys], dim=dim if dim >= 0 else dim - 1), keys[0].impl)


def _refuse(what: str) -> None:
    raise SpmdError(
        f"{what} of a key at {user_line()}: a key is no tensor, and has no arithmetic. Make other keys of it: "
        "spmd.random.split(key), spmd.random.fold_in(key, number); spmd.random.key_data(key) are its numbers."
    )


def _refusing(name: str) -> Any:
    def method(self: Key, *_: Any, **__: Any) -> None:
        _refuse(name)

    return method


for _name in _OPERATORS.split():
    setattr(Key, f"__{_name}__", _refusing(f"__{_name}__"))


def _restored(impl: str, children: Iterable[Any]) -> Key:
    """A key of what stands for its numbers: in a pytree, that may be anything."""
    (data,) = children
    return Key(data, impl)


optree.register_pytree_node(
    Key,
    lambda key: ((key.data,), key.impl, ("data",)),
    _restored,
    path_entry_type=optree.GetAttrEntry,
    namespace=NAMESPACE,
)
torch.serialization.add_safe_globals([Key])
torch_pytree.register_pytree_node(
    Key,
    lambda key: ([key.data], key.impl),
    lambda children, impl: _restored(impl, children),
    serialized_type_name="spmd.random.Key",
)


def key(seed: int | Tensor, *, impl: str = DEFAULT_IMPL, device: torch.device | str | None = None) -> Key:
    """Make a key of a seed; `jax.random.key`.

    Args:
        seed: an integer of 64 bits, or a 0-d tensor of one.
        impl: the generator: `"philox4x32"`, or `"threefry2x32"`, which draws the numbers of `jax.random` and reads the
            low 32 bits of the seed, as JAX does by default.
        device: the device on which draws are made; by default the current one.

    Raises:
        SpmdError: a seed that is no integer or has more bits, or an unknown generator.

    >>> key(0), key(0, impl="threefry2x32")
    (Key((), 'philox4x32'), Key((), 'threefry2x32'))
    """
    _check_impl(impl)
    if isinstance(seed, Tensor):
        if seed.ndim or not is_integer(seed.dtype):
            raise SpmdError(f"The seed at {user_line()} must be one integer (got {seed.dtype} {tuple(seed.shape)}).")
        number = seed.to(device=device, dtype=torch.int64)
    elif isinstance(seed, int) and not isinstance(seed, bool):
        if not -(2**63) <= seed < 2**64:
            raise SpmdError(f"The seed at {user_line()} must have 64 bits at most (got {seed}).")
        number = torch.tensor(seed - 2**64 if seed >= 2**63 else seed, device=device)
    else:
        remedy = " Make a key by it: spmd.random.from_generator(x)." if isinstance(seed, torch.Generator) else ""
        got = f"{type(seed).__name__} {seed!r:.60}"
        raise SpmdError(f"The seed at {user_line()} must be an integer (got {got}).{remedy}")
    return Key(GENERATORS[impl].seeded(number), impl)


def PRNGKey(seed: int | Tensor, *, impl: str = DEFAULT_IMPL) -> Key:
    """Make a key of a seed, as `key` does; `jax.random.PRNGKey`, of which the numbers are `key_data`.

    >>> PRNGKey(0)
    Key((), 'philox4x32')
    """
    return key(seed, impl=impl)


def key_impl(key: Key) -> str:
    """The name of the generator of keys; `jax.random.key_impl`.

    >>> key_impl(wrap_key_data(torch.tensor([0, 1]), impl="threefry2x32"))
    'threefry2x32'
    """
    return checked(key, "key_impl").impl


def wrap_key_data(key_data: Tensor, *, impl: str = DEFAULT_IMPL) -> Key:
    """Make keys of their numbers, as `key_data` returns them; `jax.random.wrap_key_data`.

    Args:
        key_data: integers [keys..., 2]. A `torch.uint64` key of `torch.func._random` makes one of `"philox4x32"`, of
            which `split` and `fold_in` make the same keys; two words of a key of JAX make one of `"threefry2x32"`.
        impl: the generator.

    Raises:
        SpmdError: no integers, another last dim, or an unknown generator.

    >>> wrap_key_data(key_data(split(key(0), 3)))
    Key((3,), 'philox4x32')
    """
    _check_impl(impl)
    if not isinstance(key_data, Tensor) or not is_integer(key_data.dtype) or key_data.shape[-1:] != (2,):
        got = f"{key_data.dtype} {tuple(key_data.shape)}" if isinstance(key_data, Tensor) else type(key_data).__name__
        raise SpmdError(f"wrap_key_data at {user_line()} expects integers [keys..., 2] (got {got}).")
    return Key(key_data.to(torch.int64), impl)


def key_data(key: Key) -> Tensor:
    """The numbers of keys, i64[keys..., 2]; `jax.random.key_data`.

    Of `"philox4x32"` they are a seed and the first counter, which `torch.func._random` splits into the same keys; of
    `"threefry2x32"` the words of JAX's key.

    >>> key_data(key(7)), key_data(key(7, impl="threefry2x32"))
    (tensor([7, 0]), tensor([0, 7]))
    """
    return checked(key, "key_data").data


def split(key: Key, num: int | tuple[int, ...] = 2) -> Key:
    """Make an array of new keys of a key, which is not to be used again; `jax.random.split`.

    Args:
        key: a single key.
        num: the number of keys, or the shape of the array.

    Raises:
        SpmdError: no key, an array of keys, or a shape that is none.

    >>> first, second = split(key(0))
    >>> split(first, (2, 3))
    Key((2, 3), 'philox4x32')
    """
    data = used(key, "split")
    shape = shape_of(num, "split", "num")
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, device=data.device)
    return Key(DERIVE_KEY(data.unsqueeze(0), numbers, key.impl).reshape(*shape, 2), key.impl)


def fold_in(key: Key, data: int | Tensor) -> Key:
    """Make a new key of a key and a number; `jax.random.fold_in`.

    It is `split(key, n)[data]` for any larger n. The key may be used for other numbers.

    Args:
        key: a single key.
        data: an integer, of which 32 bits count for `"threefry2x32"`, or a 0-d tensor of one: the number of a step, of
            a layer, or `spmd.collectives.axis_index(axis)`.

    Raises:
        SpmdError: no key, an array of keys, or a number that is no integer.

    >>> int((fold_in(key(0), 3) == split(key(0), 5)[3]).item())
    1
    """
    found = single(key, "fold_in")
    if isinstance(data, Tensor) and not data.ndim and is_integer(data.dtype):
        number = data.to(device=found.device, dtype=torch.int64)
    elif isinstance(data, int) and not isinstance(data, bool) and -(2**63) <= data < 2**64:
        number = torch.full((), data - 2**64 if data >= 2**63 else data, dtype=torch.int64, device=found.device)
    else:
        got = f"{data.dtype} {tuple(data.shape)}" if isinstance(data, Tensor) else f"{data!r:.60}"
        raise SpmdError(f"fold_in at {user_line()} expects one integer of 64 bits (got {got}).")
    return Key(DERIVE_KEY(found, number, key.impl), key.impl)


def used(key: Key, name: str) -> Tensor:
    """The numbers of the single key that a function `name` draws by; SpmdError if it is none, or was used before."""
    found = single(key, name)
    key.uses.add(name)
    return found


def single(key: Key, name: str) -> Tensor:
    """The numbers of a single key; SpmdError if it is none."""
    if checked(key, name).ndim:
        raise SpmdError(
            f"spmd.random.{name} at {user_line()} expects a single key (got an array {tuple(key.shape)}). Take one, "
            f"keys[0], or call it for each: torch.func.vmap(lambda key: spmd.random.{name}(key, ...))(keys)."
        )
    return key.data


def checked(key: Any, name: str) -> Key:
    """The argument, if it is a key or an array of keys; else SpmdError."""
    if isinstance(key, Key):
        return key
    remedy = "Wrap the numbers of a key: spmd.random.wrap_key_data(x)." if isinstance(key, Tensor) else ""
    if isinstance(key, int):
        remedy = f"Make a key of it: spmd.random.key({key})."
    elif isinstance(key, torch.Generator):
        remedy = "Make a key by it: spmd.random.from_generator(x); of its seed: spmd.random.key(x.initial_seed())."
    got = type(key).__name__
    raise SpmdError(
        f"spmd.random.{name} at {user_line()} expects a key as its first argument (got {got}). {remedy}".strip()
    )


def shape_of(shape: Any, name: str, argument: str = "shape") -> tuple[int, ...]:
    """A shape, from an integer or a sequence of them; SpmdError if it is none."""
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        raise SpmdError(
            f"{argument} of spmd.random.{name} at {user_line()} must be a tuple of lengths (got {shape!r:.60})."
        )
    return sizes


def broadcasts(tensor: Tensor, sizes: tuple[int, ...]) -> bool:
    """Test whether a tensor broadcasts to a shape."""
    pairs = zip(reversed(tensor.shape), reversed(sizes), strict=False)
    return tensor.ndim <= len(sizes) and all(own in (1, size) for own, size in pairs)


def _check_impl(impl: str) -> None:
    if impl not in GENERATORS:
        raise SpmdError(f"impl at {user_line()} must be one of {', '.join(map(repr, GENERATORS))} (got {impl!r:.60}).")
