"""What a distribution computes under `jit`, compared with one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.distributions as D
from torch import Tensor
from torch.utils._pytree import tree_map

import spmd
from proofs.distributions.cases import BATCH, Case
from spmd import P

Function = Callable[..., Any]
SEED = 7
VALUES = frozenset({"mean", "mode", "variance", "stddev"})


@attrs.frozen
class Question:
    """A quantity of a distribution.

    Args:
        name: its name.
        function: computes it.
        arguments: the tensors of which it is computed.
        is_refused: whether `jit` may refuse it with a TraceError.
    """

    name: str
    function: Function
    arguments: tuple[Tensor, ...]
    is_refused: bool = False

    def difference(self, size: int) -> str | None:
        """How `jit` over a batch that is sharded among `size` ranks differs from one device; None if not at all."""
        mesh = spmd.make_mesh({"x": size}, runtime="virtual")
        expected = _outcome(lambda: self.function(*self.arguments))
        found = _outcome(lambda: spmd.jit(self.function, P("x"), mesh=mesh)(*self.arguments))
        if self.is_refused and isinstance(found, spmd.TraceError):
            return None
        if isinstance(expected, Exception) or isinstance(found, Exception):
            return None if type(expected) is type(found) else f"{found!r}, and one device {expected!r}"
        try:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True, check_stride=False)
        except AssertionError as error:
            return str(error)
        return None


def questions(case: Case) -> Iterator[Question]:
    """What is compared of a distribution."""
    for name, function, arguments in (*_quantities(case), *_refusals(case)):
        yield Question(name, function, arguments, any(part in name for part in case.refused))


def divergence(p: Case, q: Case) -> Question:
    """A Kullback-Leibler divergence."""
    count = len(p.parameters)

    def kl(*arguments: Tensor) -> Tensor:
        return D.kl_divergence(p.make(*arguments[:count]), q.make(*arguments[count:]))

    return Question(f"kl to {q.name}", kl, (*p.parameters, *q.parameters))


def _quantities(case: Case) -> Iterator[tuple[str, Function, tuple[Tensor, ...]]]:
    make, parameters, value = case.make, case.parameters, case.value()
    made = make(*parameters)
    take = lambda name: lambda *p: getattr(make(*p), name) if name in VALUES else getattr(make(*p), name)()  # noqa: E731
    of_value = lambda name: lambda *p: getattr(make(*p[:-1]), name)(p[-1])  # noqa: E731
    for name in (*VALUES, "sample", "rsample", "entropy", "perplexity", "enumerate_support"):
        yield name, take(name), parameters
    for name in ("log_prob", "cdf"):
        yield name, of_value(name), (*parameters, value)
    yield "icdf", of_value("icdf"), (*parameters, torch.linspace(0.2, 0.8, BATCH))
    yield "expand", lambda *p: make(*p[:-1]).expand((2, BATCH)).log_prob(p[-1]), (*parameters, value)
    yield "made outside", lambda x: made.log_prob(x), (value,)
    yield "gradient of log_prob", _gradient(of_value("log_prob")), (*parameters, value)
    for name in ("rsample", "entropy"):
        yield f"gradient of {name}", _gradient(take(name)), parameters


def _refusals(case: Case) -> Iterator[tuple[str, Function, tuple[Tensor, ...]]]:
    def made(*parameters: Tensor) -> Tensor:
        case.make(*parameters)
        return parameters[0] * 1

    if case.bad is not None:
        yield "bad parameters", made, case.bad
        yield "gradient at bad parameters", _gradient(made), case.bad
    if case.outside is not None:
        yield "bad value", lambda *p: case.make(*p[:-1]).log_prob(p[-1]), (*case.parameters, case.outside)


def _gradient(function: Function) -> Function:
    def gradient(*arguments: Tensor) -> Any:
        wanted = tuple(n for n, x in enumerate(arguments) if x.is_floating_point())
        scalar = lambda *a: function(*a).sum()  # noqa: E731
        try:
            return torch.func.grad(scalar, wanted)(*arguments)
        except RuntimeError as error:  # of one device: a torch.autograd.Function of torch.distributions takes a context
            if "setup_context" not in str(error):
                raise
        leaves = [x.clone().requires_grad_(n in wanted) for n, x in enumerate(arguments)]
        return torch.autograd.grad(scalar(*leaves), [leaves[n] for n in wanted])

    return gradient


def _outcome(call: Callable[[], Any]) -> Any:
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = call()
        except Exception as error:
            return error
    return tree_map(lambda x: x.full_tensor() if isinstance(x, spmd.DTensor) else x, result)
