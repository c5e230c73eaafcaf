"""The arguments of a call by position, as `in_specs`, `static_argnums` and `donate_argnums` speak of them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import optree

from spmd.api.programs.options import Options
from spmd.api.programs.result_specs import Argument
from spmd.core.pytree import is_spec
from spmd.core.spec import DTensorSpec
from spmd.errors import ShardingError, TraceError
from spmd.tracing.traced import dynamic_paths

SELF = "self"
"""The keyword by which the functions of modules take their module."""

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@attrs.frozen(cache_hash=True)
class ArgumentOrder:
    """How the calls that give the same arguments, by position or by name, become calls by position.

    Arguments that cannot go by position come last: those of keyword-only parameters, of `**kwargs`, and those that
    follow a parameter which is left to its default.

    Args:
        labels: what messages call each argument: its position, or its name if it goes by name.
        keywords: the names of the last arguments, by which the function takes them.
        static: the positions of static arguments.
        donated: the positions of donated arguments.
        names: the name of each argument's parameter, for `in_specs` that are given by name.
        given: the names of the arguments that a call gives by name, in the order in which they go by position.
        optional: how many parameters after those that go by position have defaults.
    """

    labels: tuple[str, ...]
    keywords: tuple[str, ...]
    static: tuple[int, ...]
    donated: tuple[int, ...]
    names: tuple[str, ...] = attrs.field(eq=False)
    given: tuple[str, ...] = attrs.field(eq=False)
    optional: int = attrs.field(eq=False)

    @property
    def described(self) -> str:
        """The arguments that are not static, in messages."""
        return "the arguments that are not static" if self.static else "the arguments"

    @property
    def dynamic(self) -> list[int]:
        """The positions of the arguments that are not static."""
        return [number for number in range(len(self.labels)) if number not in self.static]

    def paths(self, tree: optree.PyTreeSpec) -> list[str]:
        """The path of each leaf of the tuple of dynamic arguments, which has this structure."""
        return dynamic_paths(tree, [self.labels[number] for number in self.dynamic])

    def arguments(self, tree: optree.PyTreeSpec, specs: Sequence[DTensorSpec | None]) -> list[Argument]:
        """The arguments of a call, as results may take their specs.

        Args:
            tree: the structure of the tuple of dynamic arguments.
            specs: the spec of each leaf of them; None for one that is no tensor.
        """
        arguments, rest = [], iter(specs)
        for position, (number, child) in enumerate(zip(self.dynamic, tree.children(), strict=True)):
            own = tuple(itertools.islice(rest, child.num_leaves))
            label, name = self.labels[number], self.names[number]
            arguments.append(Argument(label, name, position, number in self.donated, child, own))
        return arguments

    def positional(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call by position."""
        return (*args, *map(keywords.__getitem__, self.given)) if keywords else args

    def by_position(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one of arguments by position; it takes those by name that the call gives by name."""
        if not self.given:
            return function
        count = len(self.labels) - len(self.given)

        def call(*args: Any) -> Any:
            return function(*args[:count], **dict(zip(self.given, args[count:], strict=True)))

        call.__name__ = getattr(function, "__name__", type(function).__name__)
        call.__wrapped__ = function  # type: ignore[attr-defined]
        positional_only = inspect.Parameter.POSITIONAL_ONLY
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, positional_only) for name in dict.fromkeys(self.names)]
        )
        return call

    def prefix(self, in_specs: Any) -> Any:
        """`in_specs` as a pytree prefix of the tuple of arguments that are not static; None where none is given.

        Raises:
            ShardingError: a name that no argument of the call has.
        """
        if is_spec(in_specs) and SELF in self.keywords:
            return tuple(None if self.names[number] == SELF else in_specs for number in self.dynamic)
        if in_specs is None or is_spec(in_specs):
            return in_specs
        if isinstance(in_specs, Mapping):
            return tuple(in_specs.get(self.names[number]) for number in self.dynamic)
        if type(in_specs) is not tuple:
            return in_specs
        by_name = len(self.keywords)
        missing = len(in_specs) - sum(number < len(self.labels) - by_name for number in self.dynamic)
        kept = in_specs[:-missing] if 0 < missing <= self.optional else in_specs
        return (*kept, *[None] * sum(number >= len(self.labels) - by_name for number in self.dynamic))


class Parameters:
    """The parameters of a jitted function, and the layouts of its calls.

    Args:
        function: the function.
        options: those of `jit`.
        in_specs: that of `jit`; if it is a mapping, its keys must be parameters.
        bound: arguments by name that every call has beside those of the caller.

    Raises:
        ShardingError: `in_specs` names a parameter that the function does not have.
        TraceError: `static_argnames` does.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Options,
        in_specs: Any,
        bound: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.function, self._options, self.bound = function, options, bound
        self._layouts: dict[Any, ArgumentOrder] = {}
        self._signature, self._own = _signature(function), _signature(function, follow_wrapped=False)
        if isinstance(in_specs, Mapping):
            self._check_names("in_specs", list(in_specs), ShardingError)
        self._check_names("static_argnames", options.static_argnames, TraceError)

    def known(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> ArgumentOrder | None:
        """The layout of a call, if there was one like it."""
        return self._layouts.get((len(args), *keywords) if keywords else len(args))

    def layout(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> ArgumentOrder:
        """The layout of a call.

        Raises:
            TraceError: the function does not take such arguments.
        """
        found = self.known(args, keywords)
        if found is None:
            found = self._layouts[(len(args), *keywords) if keywords else len(args)] = self._make(args, keywords)
        return found

    def _make(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> ArgumentOrder:
        self._bind(self._own, args, keywords)  # a decorator may take others than the function that it wraps
        if keywords:
            self._bind(self._signature, args, keywords)
        parameters = self._by_position()
        names = [p.name for p in parameters[: len(args)]]
        names += [f"arg{number}" for number in range(len(names), len(args))]
        given: list[str] = []
        rest = parameters[len(args) :]
        while rest and rest[0].name in keywords and rest[0].kind is not inspect.Parameter.POSITIONAL_ONLY:
            given.append(rest.pop(0).name)
        by_name = sorted(set(keywords) - set(given))
        names += [*given, *by_name]
        count = len(args) + len(given)
        optional = sum(p.default is not inspect.Parameter.empty for p in rest)
        labels = (*map(str, range(count)), *by_name)
        static = set(_positions(self._options.static_argnums, count, "static_argnums"))
        static |= {number for number, name in enumerate(names) if name in self._options.static_argnames}
        donated = _positions(self._options.donate_argnums, count, "donate_argnums")
        if not static.isdisjoint(donated):
            raise TraceError(
                f"Argument {min(static.intersection(donated))} is static and in donate_argnums="
                f"{self._options.donate_argnums}. Static arguments hold no tensors that could be donated."
            )
        return ArgumentOrder(
            labels, tuple(by_name), tuple(sorted(static)), donated, tuple(names), (*given, *by_name), optional
        )

    def _bind(self, signature: inspect.Signature | None, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        if signature is None:
            return
        try:
            signature.bind(*args, **keywords)
        except TypeError as error:
            raise TraceError(f"spmd.jit({self.name}) takes {signature}: {error}.") from None

    @property
    def name(self) -> str:
        """The function's name in messages."""
        return str(getattr(self.function, "__qualname__", self.function))

    def _by_position(self) -> list[inspect.Parameter]:
        every = self._signature.parameters.values() if self._signature else ()
        return [p for p in every if p.kind in _BY_POSITION]

    def _check_names(self, what: str, names: Sequence[Any], error: type[Exception]) -> None:
        every = self._signature.parameters.values() if self._signature else ()
        if self._signature is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in every):
            return
        known = [p.name for p in every if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        for name in names:
            if name not in known:
                raise error(
                    f"{what} names {name!r}, but {self.name} has the parameters {', '.join(known)}. Name one of them."
                )


def _signature(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature | None:
    """The signature of a function; None if it is not available, as of many written in C."""
    try:
        return inspect.signature(function, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        return None


def _positions(numbers: Sequence[int], count: int, what: str) -> tuple[int, ...]:
    """Argument numbers counted from the start, without repetitions, in order.

    Raises:
        TraceError: a number that no argument of the call has.
    """
    for number in numbers:
        if not -count <= number < count:
            raise TraceError(f"{what}={tuple(numbers)} names argument {number}, but the call has {count} arguments.")
    return tuple(sorted({number % count for number in numbers}))
