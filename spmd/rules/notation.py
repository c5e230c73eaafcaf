"""The factor language: `factors("i k, k j -> i j", sum="k")` says how an operator's dims relate.

One term a tensor, operands before `->` and results after it; in a term one word a dim:

- a name is a factor; equal names have equal lengths;
- `(b s)` is a dim made of several factors, major first;
- `...` is any number of dims, aligned right and broadcast: a dim of length 1 that meets a longer one is not cut;
- `1` is a dim of length 1 and `_` one of any length, neither of which is ever cut.

Operand terms stand for the operator's tensor arguments in schema order; those that a call leaves out are skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeAlias

import attrs
import torch

from spmd.errors import RuleError
from spmd.placement import Reduction
from spmd.rules.rule import Call, FactorDims, Factors, Row, Rule
from spmd.spec import TensorMeta

Rows: TypeAlias = Callable[[Call], Iterable[Row]]
"""What adds written-out rows to a rule: linearity (`spmd.rules.partial`) or local bodies."""

_ELLIPSIS = ("...",)
_WORD = re.compile(r"\([\w\s]*\)|\.\.\.|\w+")


@attrs.frozen
class Pattern:
    """A parsed pattern: the words of every dim of every operand and result."""

    text: str
    operands: tuple[FactorDims, ...]
    results: tuple[FactorDims, ...]

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Parse a pattern; RuleError if it is malformed."""
        sides = text.split("->")
        if len(sides) != 2:
            raise RuleError(f"Factors {text!r} must have one '->' between operands and results.")
        operands, results = (tuple(_parse_term(term, text) for term in side.split(",")) for side in sides)
        return cls(text, operands, results)

    def bind(self, operands: Sequence[tuple[FactorDims, TensorMeta]], results: Sequence[TensorMeta]) -> Factors:
        """The factors of tensors with these metas; each operand comes with its term."""
        if len(results) != len(self.results):
            raise self._misfit(operands, results, f"it has {len(self.results)} results, the call {len(results)}")
        terms = [*operands, *zip(self.results, results, strict=True)]
        width = max((meta.ndim - len(dims) + 1 for dims, meta in terms if _ELLIPSIS in dims), default=0)
        expanded = [_expand(dims, meta, width) for dims, meta in terms]
        if None in expanded:
            raise self._misfit(operands, results, f"tensor {expanded.index(None)} has another number of dims")
        pairs = [(dims or (), meta.shape) for dims, (_, meta) in zip(expanded, terms, strict=True)]
        try:
            sizes = _solve(pairs)
        except ValueError as error:
            raise self._misfit(operands, results, str(error)) from None
        cut = [tuple(_cuttable(names, size, sizes) for names, size in zip(*pair, strict=True)) for pair in pairs]
        return Factors(tuple(cut[: len(operands)]), tuple(cut[len(operands) :]), sizes)

    def _misfit(
        self, operands: Sequence[tuple[FactorDims, TensorMeta]], results: Sequence[TensorMeta], why: str
    ) -> RuleError:
        shapes = f"{', '.join(str(meta) for _, meta in operands)} -> {', '.join(map(str, results))}"
        return RuleError(f"Factors {self.text!r} do not fit {shapes}: {why}.")


def _parse_term(term: str, text: str) -> FactorDims:
    if _WORD.sub("", term).strip():
        term = term.strip()
        raise RuleError(f"Factors {text!r} have a malformed term {term!r}. Write names, '(a b)', '...', '1' or '_'.")
    dims = tuple(tuple(word.strip("()").split()) for word in _WORD.findall(term))
    if dims.count(_ELLIPSIS) > 1:
        raise RuleError(f"Factors {text!r} have a term {term.strip()!r} with more than one '...'.")
    return dims


def _expand(dims: FactorDims, meta: TensorMeta, width: int) -> FactorDims | None:
    """The term with `...` spelled out; None if the tensor has another number of dims."""
    if _ELLIPSIS in dims:
        at = dims.index(_ELLIPSIS)
        count = meta.ndim - len(dims) + 1
        dims = (*dims[:at], *((f"...{i}",) for i in range(width - count, width)), *dims[at + 1 :])
    return dims if len(dims) == meta.ndim else None


def _solve(pairs: Sequence[tuple[FactorDims, tuple[int, ...]]]) -> dict[str, int]:
    """The length of every factor, in order of appearance; ValueError if two tensors disagree."""
    sizes: dict[str, int] = {}
    entries = [entry for pair in pairs for entry in zip(*pair, strict=True)]
    for names, size in entries:
        if names == ("1",) and size != 1:
            raise ValueError(f"a dim of length {size} stands where 1 is expected")
        if len(names) != 1 or names[0] in ("1", "_"):
            continue
        known = sizes.setdefault(names[0], size)
        if names[0].startswith("...") and 1 in (known, size):
            sizes[names[0]] = size if known == 1 else known
        elif known != size:
            raise ValueError(f"factor {names[0]!r} has lengths {known} and {size}")
    composite = [entry for entry in entries if len(entry[0]) > 1]
    for names, size in composite * len(composite):
        unknown = [name for name in names if name not in sizes]
        if len(unknown) == 1:
            sizes[unknown[0]] = size // max(1, math.prod(sizes[name] for name in names if name in sizes))
    for names, size in composite:
        if any(name not in sizes for name in names):
            raise ValueError(f"the lengths of ({' '.join(names)}) cannot be told")
        if math.prod(sizes[name] for name in names) != size:
            raise ValueError(f"({' '.join(names)}) has length {size}, not the product of its factors")
    return sizes


def _cuttable(names: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    if names in (("1",), ("_",)):
        return ()
    if size != math.prod(sizes[name] for name in names):
        return ()
    return tuple(name for name in names if sizes[name] != 1) if len(names) > 1 else names  # atoms are longer than 1


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
    """`factors` with the rows that `rows` add to it."""
    added = tuple(row for make in rows for row in make(call))
    return attrs.evolve(factors, rows=factors.rows + added) if added else factors


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
    additive: str = "",
    size_argument: int | None = None,
) -> Rule:
    """The rule of an operator in factor notation.

    Args:
        pattern: the factors of the operands and results, as in the module's text.
        rows: what does not follow from factors, such as `linear("self", "mat2")`.
        sum, max, min: factors over which results are reduced.
        replicate: factors along which the operator cannot be cut.
        additive: names of arguments that are added to a reduced product (`addmm`'s bias).
        size_argument: as in `Rule`.

    Raises:
        RuleError: the pattern is malformed or, when a call is asked for, does not fit its shapes.

    >>> import torch
    >>> mm = factors("i k, k j -> i j", sum="k")
    >>> meta = lambda *shape: TensorMeta(shape, torch.float32)
    >>> call = Call(torch.ops.aten.mm.default, (meta(2, 3), meta(3, 4)), {}, (meta(2, 4),))
    >>> mm.factorize(call).operands
    ((('i',), ('k',)), (('k',), ('j',)))

    The notation is einops' and Shardy's.
    """
    parsed = Pattern.parse(pattern)
    kinds: dict[Reduction, str] = {"sum": sum, "max": max, "min": min}

    def factorize(call: Call) -> Factors:
        names = operand_names(call)
        terms = dict(zip(tensor_arguments(call.op), parsed.operands, strict=False))
        if not set(names) <= terms.keys():
            raise RuleError(f"Factors {pattern!r} say nothing of argument {names[len(terms)]!r} of {call.op}.")
        bound = parsed.bind([(terms[n], meta) for n, meta in zip(names, call.operands, strict=True)], call.results)
        reduce = {name: kind for kind, words in kinds.items() for name in _words(words, bound.sizes)}
        bound = attrs.evolve(
            bound,
            reduce=reduce,
            replicate=frozenset(_words(replicate, bound.sizes)),
            additive=frozenset(i for i, name in enumerate(names) if name in additive.split()),
        )
        return finish(call, bound, rows)

    return Rule(factorize, size_argument)
