"""Random choices for an operator of the pool: operands among the values that a program has so far, dims, numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import attrs
import torch

from proofs.fuzz.environment import Environment, Rejected
from proofs.fuzz.tensors import Kind, Recipe, random_shape
from spmd.core.spec import P

_T = TypeVar("_T")

Dims = int | tuple[int, int]
"""A number of dims, or the minimum and the maximum."""


class Operand(str):
    """The name of a value, together with its tensor."""

    tensor: torch.Tensor

    def __new__(cls, name: str, tensor: torch.Tensor) -> Operand:
        """The operand whose text in a program is `name` and whose value is `tensor`."""
        made = super().__new__(cls, name)
        made.tensor = tensor
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        """The number of dims of the value."""
        return self.tensor.ndim

    @property
    def numel(self) -> int:
        """The number of elements of the value."""
        return self.tensor.numel()


@attrs.frozen
class Block:
    """Statements, and the names of the values that they define."""

    statements: tuple[str, ...]
    names: tuple[str, ...] = ()


@attrs.define
class Draw:
    """The state of a program that is being generated.

    Args:
        rng: the source of all choices.
        environment: the values so far.
        largest: the longest dim of a new tensor.
        most: the most arguments and constants.
        axes: the names of the mesh axes.
        mesh: the sizes of the mesh axes.
        in_reverse: whether the program runs under reverse mode.
        body: the statements of a body with parameters, in whose context operands are its own; see `Maker.body`.
        foreign: the values that are from outside of the body which is being generated.
        depth: how many bodies that one is in, itself included.
    """

    rng: random.Random
    environment: Environment = attrs.field(factory=Environment)
    largest: int = 5
    most: int = 6
    axes: tuple[str, ...] = ()
    mesh: tuple[int, ...] = ()
    arguments: dict[str, Recipe] = attrs.field(factory=dict)
    constants: dict[str, Recipe] = attrs.field(factory=dict)
    values: list[str] = attrs.field(factory=list)
    unused: set[str] = attrs.field(factory=set)
    adapters: list[tuple[str, str]] = attrs.field(factory=list)
    taken: set[str] = attrs.field(factory=set)
    in_reverse: bool = False
    body: Callable[[Mapping[str, str]], AbstractContextManager[list[str]]] = attrs.field(init=False)
    foreign: tuple[str, ...] = ()
    depth: int = 0
    _count: int = 0

    def choice(self, *items: _T) -> _T:
        """One of the items."""
        return self.rng.choice(items)

    def maybe(self, probability: float = 0.5) -> bool:
        """True with a probability."""
        return self.rng.random() < probability

    def integer(self, low: int, high: int) -> int:
        """An integer from `low` to `high`."""
        return self.rng.randint(low, high)

    def number(self) -> float:
        """A number that values of a program are unlikely to equal."""
        return self.rng.choice((0.37, -0.61, 1.3, 0.83, -1.7, 2.1))

    def name(self) -> str:
        """A new name."""
        self._count += 1
        return f"v{self._count}"

    def floats(self, ndim: Dims = (0, 4), **wanted: Any) -> Operand:
        """A float64 tensor; see `tensor`."""
        return self.tensor((Kind.FLOAT,), ndim, **wanted)

    def complexes(self, ndim: Dims = (0, 4), **wanted: Any) -> Operand:
        """A complex128 tensor; see `tensor`."""
        return self.tensor((Kind.COMPLEX,), ndim, **wanted)

    def ints(self, ndim: Dims = (0, 4), **wanted: Any) -> Operand:
        """An int64 tensor; see `tensor`."""
        return self.tensor((Kind.INT,), ndim, **wanted)

    def bools(self, ndim: Dims = (0, 4), **wanted: Any) -> Operand:
        """A bool tensor; see `tensor`."""
        return self.tensor((Kind.BOOL,), ndim, **wanted)

    def anything(self, ndim: Dims = (0, 4), **wanted: Any) -> Operand:
        """A tensor of any kind, mostly float; see `tensor`."""
        return self.tensor(tuple(Kind), ndim, **wanted)

    def tensor(
        self,
        kinds: Sequence[Kind],
        ndim: Dims = (0, 4),
        *,
        nonempty: bool = False,
        where: Callable[[torch.Tensor], bool] | None = None,
        make: Callable[[], Sequence[int]] | None = None,
        fresh: float = 0.07,
    ) -> Operand:
        """A value of the program, preferably one that no line reads yet, or sometimes a new tensor.

        Args:
            kinds: the kinds of values that it may have.
            ndim: its number of dims.
            nonempty: whether it must have elements.
            where: a further condition.
            make: makes the shape of a new tensor.
            fresh: the probability of a new tensor if there are suitable values.

        Raises:
            Rejected: there is no such value.
        """
        low, high = (ndim, ndim) if isinstance(ndim, int) else ndim

        def fits(tensor: torch.Tensor) -> bool:
            if Kind.of(tensor) not in kinds or not low <= tensor.ndim <= high or (nonempty and not tensor.numel()):
                return False
            return where is None or where(tensor)

        found = [name for name in self.values if fits(self.environment.values[name])]
        if found and self.rng.random() >= fresh:
            return self._take(self._prefer(found))
        shape = tuple(make()) if make else self._shape(low, min(high, 4), nonempty)
        made = self.fresh(self.rng.choice(kinds) if Kind.FLOAT not in kinds else Kind.FLOAT, shape)
        if not fits(made.tensor):
            raise Rejected("no operand")
        return made

    def _shape(self, low: int, high: int, nonempty: bool) -> tuple[int, ...]:
        ndim = self.rng.randint(max(low, min(high, 1)), min(high, max(low, 3)))
        shape = random_shape(self.rng, ndim, self.largest)
        return tuple(max(size, 1) for size in shape) if nonempty else shape

    def _prefer(self, found: list[str]) -> str:
        unread = [name for name in found if name in self.unused]
        return self.rng.choice(unread if unread and self.rng.random() < 0.8 else found)

    def _take(self, name: str) -> Operand:
        self.taken.add(name)
        return Operand(name, self.environment.values[name])

    def sized(self, shape: Sequence[int | None], kind: Kind = Kind.FLOAT, fresh: float = 0.1) -> Operand:
        """A value of a shape, in which None stands for any positive length."""

        def fits(tensor: torch.Tensor) -> bool:
            return all(size == want or (want is None and size) for size, want in zip(tensor.shape, shape, strict=True))

        def make() -> Sequence[int]:
            return [self.rng.randint(1, self.largest) if want is None else want for want in shape]

        return self.tensor((kind,), len(shape), where=fits, make=make, fresh=fresh)

    def broadcast(self, x: Operand, kind: Kind = Kind.FLOAT) -> Operand:
        """A value that broadcasts to the shape of another."""

        def fits(tensor: torch.Tensor) -> bool:
            ends = zip(tensor.shape[::-1], x.shape[::-1], strict=False)
            return tensor.ndim <= x.ndim and all(size in (1, want) for size, want in ends)

        def make() -> Sequence[int]:
            shape = [1 if size and self.maybe(0.2) else size for size in x.shape]
            return shape[self.rng.randint(0, x.ndim) if self.maybe(0.3) else 0 :]

        return self.tensor((kind,), (0, x.ndim), where=fits, make=make, fresh=0.2)

    def like(self, x: Operand, kind: Kind = Kind.FLOAT) -> Operand:
        """A value of the same shape as another."""
        return self.sized(x.shape, kind, fresh=0.15)

    def dim(self, x: Operand, *, nonempty: bool = False) -> int:
        """A dim of a value, as a nonnegative or a negative index."""
        dims = [dim for dim in range(x.ndim) if x.shape[dim] or not nonempty]
        if not dims:
            raise Rejected("no dim")
        return self.rng.choice(dims) - (x.ndim if self.maybe(0.4) else 0)

    def dims(self, x: Operand) -> tuple[int, ...]:
        """Some dims of a value, at least one."""
        if not x.ndim:
            raise Rejected("no dim")
        return tuple(sorted(self.rng.sample(range(x.ndim), self.rng.randint(1, x.ndim))))

    def axis(self) -> str:
        """A mesh axis; one with more than one rank, if there is any."""
        return self.rng.choice(self._wide_axes() or list(self.axes))

    def two_axes(self) -> tuple[str, str]:
        """Two mesh axes with more than one rank, in either order."""
        axes = self._wide_axes()
        if len(axes) < 2:
            raise Rejected("too few axes")
        first, second = self.rng.sample(axes, 2)
        return first, second

    def _wide_axes(self) -> list[str]:
        return [axis for axis, size in zip(self.axes, self.mesh, strict=True) if size > 1]

    def spec(self, ndim: int, partial: str | None = None, pending: float = 0.0) -> P:
        """A random spec: each mesh axis shards a dim, replicates or, with probability `pending`, is partial."""
        dims: list[list[str]] = [[] for _ in range(ndim)]
        waiting: dict[str, Any] = {}
        for axis in self.rng.sample(self.axes, len(self.axes)):
            number = self.rng.random()
            if partial is not None and number < pending:
                waiting[axis] = partial
            elif ndim and number < 0.75:
                dims[self.rng.randrange(ndim)].append(axis)
        return P(*dims, partial=waiting)

    def index(self, shape: Sequence[int], bound: int, *, distinct: bool = False) -> str:
        """An expression for indices below `bound`: a literal, or computed from a value.

        Args:
            shape: the shape of the indices.
            bound: the number of rows.
            distinct: whether no index may occur twice; `shape` then has one dim.
        """
        if bound < 1:
            raise Rejected("nothing to index")
        if distinct:
            if shape[0] > bound:
                raise Rejected("too few rows")
            return f"torch.tensor({self.rng.sample(range(bound), shape[0])})"
        if self.maybe(0.5) and 0 not in shape:
            x = self.tensor(
                (Kind.INT, Kind.FLOAT), len(shape), where=lambda t: tuple(t.shape) == tuple(shape), make=lambda: shape
            )
            if x.tensor.dtype == torch.int64:
                return f"({x} % {bound})"
            return f"({x} * 3).long() % {bound}"
        numbers = [self.rng.randrange(bound) for _ in range(math.prod(shape))]
        if len(shape) == 1:
            return f"torch.tensor({numbers}, dtype=torch.int64)"
        return f"torch.tensor({numbers}, dtype=torch.int64).view({tuple(shape)})"

    def fresh(self, kind: Kind, shape: Sequence[int]) -> Operand:
        """A new argument or constant or, if there are `most` of them already, a value reshaped to `shape`."""
        if math.prod(shape) > 600:
            raise Rejected("large")
        if len(self.arguments) + len(self.constants) >= self.most:
            return self.adapted(kind, tuple(shape), self.values)
        argument = len(self.arguments) < 2 or self.maybe(0.7)
        table = self.arguments if argument else self.constants
        name = f"{'x' if argument else 'c'}{len(table)}"
        recipe = Recipe(kind, tuple(shape), seed=self.rng.randrange(1000)).relaid(self.rng)
        table[name] = recipe
        self.environment.define(name, recipe, argument=argument)
        self.values.append(name)
        return self._take(name)

    def adapted(self, kind: Kind, shape: tuple[int, ...], among: Sequence[str]) -> Operand:
        """One of some values reshaped to `shape`."""
        numel = math.prod(shape)
        found = [name for name in among if self._has(name, kind)]
        if not found:
            raise Rejected("no operand")
        x = self._take(self._prefer(found))
        if x.numel >= numel:
            text = f"{x}.reshape(-1)[:{numel}].reshape({shape})"
        elif self.maybe(0.3):
            text = f"{x}.reshape(-1)[:1].expand({numel}).reshape({shape})"
        else:
            text = f"{x}.reshape(-1).repeat({-(-numel // x.numel)})[:{numel}].reshape({shape})"
        name = self.name()
        self.environment.bind(name, *self.environment.evaluate(text))
        self.adapters.append((name, f"{name} = {text}"))
        self.values.append(name)
        return self._take(name)

    def _has(self, name: str, kind: Kind) -> bool:
        tensor = self.environment.values[name]
        return Kind.of(tensor) is kind and tensor.numel() > 0

    def is_own(self, x: Operand, more: Iterable[str] = ()) -> bool:
        """Whether a value may be written to: no argument, constant, value around the body or of `more` shares it."""
        others = (self.environment.values[name] for name in (*self.arguments, *self.constants, *self.foreign, *more))
        memory = x.tensor.untyped_storage().data_ptr()
        return all(other.untyped_storage().data_ptr() != memory for other in others)

    def distinct(self, x: Operand, dim: int) -> None:
        """Check that no number occurs twice along a dim, so that sorting has one result.

        Raises:
            Rejected: a number occurs twice.
        """
        if x.numel and x.tensor.ndim and x.shape[dim] > 1:
            steps = x.tensor.sort(dim).values.diff(dim=dim)
            if not bool((steps.abs() > 1e-6).all()):
                raise Rejected("equal numbers")
