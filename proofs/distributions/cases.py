"""The distributions of torch, with parameters that each takes, and parameters and a value that it refuses."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.distributions as D
from torch import Tensor
from torch.distributions.kl import _KL_REGISTRY

BATCH = 5


@attrs.frozen
class Case:
    """A distribution over a batch.

    Args:
        name: its name.
        make: makes it of its parameters.
        parameters: their values; dim 0 is the batch.
        bad: for some parameter a value that makes one example of the batch invalid.
        outside: a value that is not in the support; None if there is none.
        refused: what `jit` may refuse: samplers that draw again, shapes that depend on values.
    """

    name: str
    make: Callable[..., D.Distribution]
    parameters: tuple[Tensor, ...]
    bad: tuple[Tensor, ...] | None
    outside: Tensor | None
    refused: tuple[str, ...] = ()

    def value(self) -> Tensor:
        """A value in the support, for each example of the batch."""
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of Wishart's sampler
            return self.make(*self.parameters).sample()


def cases() -> list[Case]:
    """All distributions that torch exports, some of them in two parametrisations."""
    return list(_cases())


def _cases() -> Iterator[Case]:
    numbers, positive, unit = _normal(0), _normal(1).exp() + 0.5, _normal(2).sigmoid()
    logits, simplex, factor = _normal(3, 4), _normal(4, 4).softmax(-1), _normal(6, 4, 2)
    concentration, diagonal = _normal(5, 4).exp() + 0.5, _normal(7, 4).exp()
    root = _normal(10, 4, 4)
    matrix = root @ root.mT + torch.eye(4)
    counts, nan = torch.arange(5.0) + 1, float("nan")

    def case(make: Any, *parameters: Tensor, bad: Any = -1.0, outside: Any = nan, name: str = "", **more: Any) -> Case:
        made = make(*parameters)
        return Case(
            name or make.__name__,
            make,
            parameters,
            None if bad is None else (*parameters[:-1], _spoiled(parameters[-1], bad)),
            None if outside is None else torch.full(made.batch_shape + made.event_shape, outside),
            **more,
        )

    yield case(D.Bernoulli, unit, bad=2.0, outside=0.5)
    yield case(lambda x: D.Bernoulli(logits=x), numbers, bad=nan, outside=0.5, name="Bernoulli of logits")
    yield case(D.Beta, positive, positive + 1, outside=2.0)
    yield case(lambda p: D.Binomial(6, p), unit, bad=2.0, outside=7.0, name="Binomial")
    of_counts = "entropy", "perplexity", "enumerate_support"
    yield case(D.Binomial, counts, unit, bad=2.0, outside=7.0, name="Binomial of counts", refused=of_counts)
    yield case(D.Categorical, simplex, outside=4)
    yield case(lambda x: D.Categorical(logits=x), logits, bad=nan, outside=4, name="Categorical of logits")
    yield case(D.Cauchy, numbers, positive)
    yield case(D.Chi2, positive, outside=-1.0)
    continuous = functools.partial(D.ContinuousBernoulli, validate_args=True)
    yield case(continuous, unit, bad=2.0, outside=2.0, name="ContinuousBernoulli")
    yield case(D.Dirichlet, concentration, outside=0.9)
    yield case(D.Exponential, positive, outside=-1.0)
    yield case(D.FisherSnedecor, positive, positive + 5, outside=-1.0)
    yield case(D.Gamma, positive, positive + 1, outside=-1.0)
    if hasattr(D, "GeneralizedPareto"):
        pareto = lambda c, m, s: D.GeneralizedPareto(m, s, c)  # noqa: E731
        yield case(pareto, unit, numbers, positive, outside=-9.0, name="GeneralizedPareto")
    yield case(D.Geometric, unit, bad=0.0, outside=-1.0)
    yield case(D.Gumbel, numbers, positive)
    yield case(D.HalfCauchy, positive, outside=-1.0)
    yield case(D.HalfNormal, positive, outside=-1.0)
    yield case(lambda m, s: D.Independent(D.Normal(m, s), 1), logits, diagonal, name="Independent")
    yield case(D.InverseGamma, positive + 2, positive, outside=-1.0)
    yield case(D.Kumaraswamy, positive, positive + 1, outside=2.0)
    yield case(lambda c: D.LKJCholesky(3, c), positive, outside=2.0, name="LKJCholesky")
    yield case(D.Laplace, numbers, positive)
    yield case(D.LogNormal, numbers, positive, outside=-1.0)
    yield case(D.LogisticNormal, _normal(8, 3), _normal(9, 3).exp(), outside=0.9)
    yield case(D.LowRankMultivariateNormal, logits, factor, diagonal, bad=None)  # one device fails before the check
    yield case(_mixture, simplex, logits, diagonal, name="MixtureSameFamily")
    yield case(lambda p: D.Multinomial(6, p), simplex, outside=0.5, name="Multinomial")
    yield case(D.MultivariateNormal, logits, matrix)
    of_precisions = lambda m, x: D.MultivariateNormal(m, precision_matrix=x)  # noqa: E731
    yield case(of_precisions, logits, matrix, name="MultivariateNormal of precisions")
    of_roots = lambda m, x: D.MultivariateNormal(m, scale_tril=x)  # noqa: E731
    yield case(of_roots, logits, torch.linalg.cholesky(matrix), name="MultivariateNormal of roots")
    yield case(D.NegativeBinomial, positive, unit, bad=2.0, outside=-1.0)
    yield case(D.Normal, numbers, positive)
    yield case(D.OneHotCategorical, simplex, outside=0.5)
    yield case(D.OneHotCategoricalStraightThrough, simplex, outside=0.5)
    yield case(D.Pareto, positive, positive + 3, outside=-1.0)
    yield case(D.Poisson, positive, outside=-1.0)
    temperature = torch.tensor(0.7)
    yield case(lambda p: D.RelaxedBernoulli(temperature, p), unit, bad=2.0, outside=2.0, name="RelaxedBernoulli")
    relaxed = lambda p: D.RelaxedOneHotCategorical(temperature, p)  # noqa: E731
    yield case(relaxed, simplex, outside=0.9, name="RelaxedOneHotCategorical")
    yield case(D.StudentT, positive + 3, numbers, positive)
    yield case(lambda df: D.StudentT(df), positive, name="StudentT of low degrees")
    yield case(_affine, numbers, positive, bad=None, name="TransformedDistribution")
    yield case(_squashed, numbers, positive, outside=4.0, name="TransformedDistribution of two")
    yield case(D.Uniform, numbers, numbers + positive, bad=-9.0, outside=9.0)
    yield case(D.VonMises, numbers, positive, refused=("sample",))
    yield case(D.Weibull, positive, positive + 1, outside=-1.0)
    yield case(D.Wishart, positive + 4, matrix, refused=("sample",))


def pairs() -> Iterator[tuple[Case, Case]]:
    """The pairs of cases for which torch has a Kullback-Leibler divergence."""
    every = cases()
    for p in every:
        for q in every:
            kinds = [type(case.make(*case.parameters)) for case in (p, q)]
            if any(all(map(issubclass, kinds, pair)) for pair in _KL_REGISTRY):
                yield p, q


def _mixture(probs: Tensor, loc: Tensor, scale: Tensor) -> D.Distribution:
    return D.MixtureSameFamily(D.Categorical(probs), D.Normal(loc, scale))


def _affine(loc: Tensor, scale: Tensor) -> D.Distribution:
    base = D.Normal(torch.zeros(BATCH), torch.ones(BATCH))
    return D.TransformedDistribution(base, D.AffineTransform(loc, scale))


def _squashed(loc: Tensor, scale: Tensor) -> D.Distribution:
    return D.TransformedDistribution(D.Normal(loc, scale), [D.TanhTransform(), D.AffineTransform(1, 2)])


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(seed))


def _spoiled(x: Tensor, value: float) -> Tensor:
    """A parameter with one example of the batch invalid: in the last shard."""
    x = x.clone()
    x[-1] = value
    return x
