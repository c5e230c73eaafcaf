"""The factor language: `factors("i k, k j -> i j", sum="k")` says how an operator's dims relate.

A pattern has one term per tensor, operands before `->` and results after it. A term has one word per dim:

- a name is a factor; equal names have equal lengths;
- `(b s)` is a dim that is the product of several factors, major first;
- `...` is any number of dims, aligned right and broadcast: a dim of length 1 is not sharded where others are longer;
- `1` is a dim of length 1, `_` a dim of any length and `*` any number of dims; none of these is ever sharded.

A term in brackets, `[b i j]`, broadcasts: its tensor may lack leading dims, and may have length 1 in others. Operand
terms are those of the operator's tensor arguments in schema order; arguments that a call leaves out are skipped.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TypeAlias

import attrs
import torch

from spmd.core.placement import Reduction
from spmd.core.spec import TensorMeta
from spmd.errors import RuleError
from spmd.ir.call import Call
from spmd.rules.rule import Body, FactorDims, Factors, Row, Rule

Rows: TypeAlias = Callable[[Call], Iterable[Row]]
"""From a call to strategies that do not follow from factors: linearity (`spmd.rules.partial`) or local implementations
for certain dims."""

_ELLIPSIS: tuple[str, ...] = ("...",)
_UNSHARDED: tuple[str, ...] = ("*",)
_WORD = re.compile(r"\([\w\s]*\)|\.\.\.|\*|\w+")


@attrs.frozen
class Term:
    """The part of a pattern that describes one tensor, one word per dim; a `loose` term, in brackets, broadcasts."""

    dims: FactorDims
    loose: bool = False

    @classmethod
    def parse(cls, term: str, pattern: str) -> Term:
        """Parse one term of `pattern`; RuleError if it is malformed."""
        text = term.strip()
        loose = text[:1] == "[" and text[-1:] == "]"
        words = text[1:-1] if loose else text
        if _WORD.sub("", words).strip():
            hint = "Write names, '(a b)', '...', '*', '1' or '_'."
            raise RuleError(f"Factors {pattern!r} have a malformed term {text!r}. {hint}")
        dims = tuple(tuple(word.strip("()").split()) for word in _WORD.findall(words))
        if dims.count(_ELLIPSIS) + dims.count(_UNSHARDED) > 1:
            raise RuleError(f"Factors {pattern!r} have a term {text!r} with more than one '...' or '*'.")
        return cls(dims, loose)

    def spell(self, ndim: int, width: int) -> FactorDims | None:
        """The factors of `ndim` dims, where `...` is up to `width` dims; None if the term does not fit `ndim` dims."""
        dims, count = self.dims, ndim - len(self.dims) + 1
        many = {_ELLIPSIS: [(f"...{i}",) for i in range(width - count, width)], _UNSHARDED: [("_",)] * count}
        dims = tuple(itertools.chain.from_iterable(many.get(names, [names]) for names in dims))
        dims = dims[-ndim or len(dims) :] if self.loose else dims
        return dims if len(dims) == ndim else None


@attrs.frozen
class Pattern:
    """A parsed pattern: a term for every operand and result."""

    text: str
    operands: tuple[Term, ...]
    results: tuple[Term, ...]

    @classmethod
    @cache
    def parse(cls, text: str) -> Pattern:
        """Parse a pattern; RuleError if it is malformed."""
        sides = text.split("->")
        if len(sides) != 2:
            raise RuleError(f"Factors {text!r} must have one '->' between operands and results.")
        operands, results = (tuple(Term.parse(term, text) for term in side.split(",")) for side in sides)
        return cls(text, operands, results)

    def bind(self, operands: Sequence[tuple[Term, TensorMeta]], results: Sequence[TensorMeta]) -> Factors:
        """The factors of tensors with these metas; each operand comes with its term.

        Raises:
            RuleError: the tensors do not fit the pattern.
        """
        if len(results) != len(self.results):
            raise self._misfit(operands, results, f"it has {len(self.results)} results, the call {len(results)}")
        pairs = [*operands, *zip(self.results, results, strict=True)]
        width = max((meta.ndim - len(term.dims) + 1 for term, meta in pairs if _ELLIPSIS in term.dims), default=0)
        spelled = [term.spell(meta.ndim, width) for term, meta in pairs]
        if None in spelled:
            raise self._misfit(operands, results, f"tensor {spelled.index(None)} has another number of dims")
        placed = [(dims or (), meta.shape, term.loose) for dims, (term, meta) in zip(spelled, pairs, strict=True)]
        try:
            sizes = _solve(placed)
        except ValueError as error:
            raise self._misfit(operands, results, str(error)) from None
        cut = [tuple(map(_shardable, dims, shape, [sizes] * len(dims))) for dims, shape, _ in placed]
        return Factors(tuple(cut[: len(operands)]), tuple(cut[len(operands) :]), sizes)

    def _misfit(
        self, operands: Sequence[tuple[Term, TensorMeta]], results: Sequence[TensorMeta], why: str
    ) -> RuleError:
        shapes = f"{', '.join(str(meta) for _, meta in operands)} -> {', '.join(map(str, results))}"
        return RuleError(f"Factors {self.text!r} do not fit {shapes}: {why}.")


def _solve(tensors: Sequence[tuple[FactorDims, tuple[int, ...], bool]]) -> dict[str, int]:
    """The length of every factor, in order of appearance, loose tensors last.

    Raises:
        ValueError: two tensors disagree on a length, or it cannot be inferred.
    """
    sizes: dict[str, int] = {}
    ordered = sorted(tensors, key=lambda tensor: tensor[2])
    entries = [(*entry, loose) for dims, shape, loose in ordered for entry in zip(dims, shape, strict=True)]
    for names, size, loose in entries:
        if names == ("1",) and size != 1:
            raise ValueError(f"a dim of length {size} stands where 1 is expected")
        if len(names) != 1 or names[0] in ("1", "_"):
            continue
        known = sizes.setdefault(names[0], size)
        if (loose or names[0].startswith("...")) and 1 in (known, size):
            sizes[names[0]] = size if known == 1 else known
        elif known != size:
            raise ValueError(f"factor {names[0]!r} has lengths {known} and {size}")
    composite = [(names, size) for names, size, loose in entries if len(names) > 1 and not (loose and size == 1)]
    for names, size in composite * len(composite):
        unknown = [name for name in names if name not in sizes]
        if len(unknown) == 1:
            sizes[unknown[0]] = size // max(1, math.prod(sizes[name] for name in names if name in sizes))
    for names, size in composite:
        if any(name not in sizes for name in names):
            raise ValueError(f"the lengths of ({' '.join(names)}) cannot be told")
        if math.prod(sizes[name] for name in names) != size:
            raise ValueError(f"({' '.join(names)}) has length {size}, not the product of its factors")
    appeared = dict.fromkeys(itertools.chain.from_iterable(names for names, _, _ in entries))
    return {name: sizes[name] for name in appeared if name in sizes}


def _shardable(names: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    if names in (("1",), ("_",)) or size != math.prod(sizes[name] for name in names):
        return ()
    return tuple(name for name in names if sizes[name] != 1) if len(names) > 1 else names  # length 1 makes no atom


@cache
def tensor_arguments(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of an operator's tensor arguments, lists of tensors included, in schema order."""
    return tuple(argument.name for argument in op._schema.arguments if "Tensor" in str(argument.type))


def operand_names(call: Call) -> tuple[str, ...]:
    """For every tensor operand of a call, the name of its argument."""
    names = [argument.name for argument in call.op._schema.arguments]
    given = [*zip(names, call.args, strict=False), *call.kwargs.items()]
    return tuple(name for name, argument in given for _ in Call(call.op, (argument,), {}, ()).operands)


def finish(call: Call, factors: Factors, rows: Sequence[Rows]) -> Factors:
    """`factors` with the rows that each of `rows` makes for the call."""
    added = tuple(row for make in rows for row in make(call))
    return attrs.evolve(factors, rows=factors.rows + added) if added else factors


def spell(call: Call, operands: Iterable[str], results: Iterable[str]) -> Factors:
    """The factors of a call from a term for every tensor operand and every result.

    Raises:
        RuleError: a term is malformed or does not fit its tensor.

    >>> meta = TensorMeta((2, 3), torch.float32)
    >>> spell(Call(torch.ops.aten.neg.default, (meta,), {}, (meta,)), ["i _"], ["i _"]).operands
    ((('i',), ()),)
    """
    pattern = Pattern.parse(f"{', '.join(operands)} -> {', '.join(results)}")
    return pattern.bind(list(zip(pattern.operands, call.operands, strict=False)), call.results)


def term(names: Iterable[str], fixed: Collection[str] = ()) -> str:
    """The term of dims that have one factor each; those in `fixed` become `_` and are not sharded.

    >>> term(["d0", "d1", "d2"], fixed=["d1"])
    'd0 _ d2'
    """
    return " ".join("_" if name in fixed else name for name in names)


def _words(text: str, sizes: Mapping[str, int]) -> Iterator[str]:
    for word in text.split():
        yield from (name for name in sizes if name.startswith("...")) if word == "..." else (word,)


def factors(
    pattern: str,
    *rows: Rows,
    sum: str = "",
    max: str = "",
    min: str = "",
    replicate: str = "",
    independent: str = "",
    additive: str = "",
    bodies: Mapping[str, Body] = MappingProxyType({}),
    size_argument: int | None = None,
    empty: Body | None = None,
) -> Rule:
    """The rule of an operator in factor notation.

    Args:
        pattern: the factors of the operands and results, in the notation of this module.
        rows: strategies that do not follow from factors, such as `linear("self", "mat2")`.
        sum, max, min: factors over which results are reduced.
        replicate: factors along which the operator cannot be sharded.
        independent: factors that some results lack because they do not depend on anything along them.
        additive: names of arguments that are added to a reduced product (`addmm`'s bias).
        bodies: by factors, the local implementation where one of them is sharded.
        size_argument, empty: as in `Rule`.

    In the strings, factors and names are separated by spaces.

    Raises:
        RuleError: the pattern is malformed. The rule's `factorize` raises it for a call that does not fit the pattern.

    >>> import torch
    >>> mm = factors("i k, k j -> i j", sum="k")
    >>> meta = lambda *shape: TensorMeta(shape, torch.float32)
    >>> call = Call(torch.ops.aten.mm.default, (meta(2, 3), meta(3, 4)), {}, (meta(2, 4),))
    >>> mm.factorize(call).operands
    ((('i',), ('k',)), (('k',), ('j',)))

    The notation follows einops and Shardy.
    """
    parsed = Pattern.parse(pattern)
    kinds: dict[Reduction, str] = {"sum": sum, "max": max, "min": min}

    def factorize(call: Call) -> Factors:
        names = operand_names(call)
        terms = dict(zip(tensor_arguments(call.op), parsed.operands, strict=False))
        if not set(names) <= terms.keys():
            raise RuleError(f"Factors {pattern!r} say nothing of argument {names[len(terms)]!r} of {call.op}.")
        bound = parsed.bind([(terms[n], meta) for n, meta in zip(names, call.operands, strict=True)], call.results)
        bound = attrs.evolve(
            bound,
            reduce={name: kind for kind, words in kinds.items() for name in _words(words, bound.sizes)},
            replicate=frozenset(_words(replicate, bound.sizes)),
            independent=frozenset(_words(independent, bound.sizes)),
            additive=frozenset(i for i, name in enumerate(names) if name in additive.split()),
            bodies={name: body for words, body in bodies.items() for name in _words(words, bound.sizes)},
        )
        return finish(call, bound, rows)

    return Rule(factorize, size_argument, empty)


def by_call(choose: Callable[[Call], Rule], *, size_argument: int | None = None, empty: Body | None = None) -> Rule:
    """The rule that applies `choose(call)` to each call: for patterns that depend on shapes or non-tensor arguments."""
    return Rule(lambda call: choose(call).factorize(call), size_argument, empty)
