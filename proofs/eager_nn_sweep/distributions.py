"""Calls of `torch.distributions`: a sample, its log probability, the entropy, mean and variance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import distributions as D
from torch.distributions import transforms

from proofs.nn_sweep.call import call
from proofs.nn_sweep.draws import positive, real
from proofs.nn_sweep.subjects import Make

_Tensor = torch.Tensor


def _used(make: Callable[..., D.Distribution]) -> Callable[..., list[_Tensor]]:
    def run(*tensors: _Tensor) -> list[_Tensor]:
        found = make(*tensors)
        samples = [found.sample(), found.sample((3,))]
        results = [*samples, *(found.log_prob(sample) for sample in samples)]
        results += [found.rsample((2,))] if found.has_rsample else []
        for name in ("entropy", "mean", "variance", "stddev"):
            try:
                value: Any = getattr(found, name)
                results.append(value() if callable(value) else value)
            except NotImplementedError:
                pass
        return results

    return run


def _calls(make: Callable[..., D.Distribution], *draw: Callable[[], _Tensor]) -> list[Make]:
    return [lambda: call(_used(make), *(one() for one in draw))]


def _real() -> _Tensor:
    return real(5, 3)


def _positive() -> _Tensor:
    return positive(5, 3)


def _simplex() -> _Tensor:
    return real(5, 3).softmax(-1)


def _vector() -> _Tensor:
    return real(3)


def _covariance() -> _Tensor:
    root = real(3, 3)
    return root @ root.T + torch.eye(3, dtype=torch.float64)


def _triangle() -> _Tensor:
    return torch.linalg.cholesky(_covariance())


CALLS: Mapping[str, Sequence[Make]] = MappingProxyType(
    {
        "distributions.Bernoulli": [
            *_calls(lambda p: D.Bernoulli(p), _positive),
            *_calls(lambda x: D.Bernoulli(logits=x), _real),
        ],
        "distributions.Beta": _calls(D.Beta, _positive, _positive),
        "distributions.Binomial": [
            *_calls(lambda p: D.Binomial(5, p), _positive),
            *_calls(lambda x: D.Binomial(5, logits=x), _real),
        ],
        "distributions.Categorical": [
            *_calls(D.Categorical, _simplex),
            *_calls(lambda x: D.Categorical(logits=x), _real),
        ],
        "distributions.Cauchy": _calls(D.Cauchy, _real, _positive),
        "distributions.Chi2": _calls(D.Chi2, _positive),
        "distributions.ContinuousBernoulli": _calls(D.ContinuousBernoulli, _positive),
        "distributions.Dirichlet": _calls(D.Dirichlet, _positive),
        "distributions.Exponential": _calls(D.Exponential, _positive),
        "distributions.FisherSnedecor": _calls(lambda a, b: D.FisherSnedecor(a + 4, b + 4), _positive, _positive),
        "distributions.Gamma": _calls(D.Gamma, _positive, _positive),
        "distributions.GeneralizedPareto": _calls(
            lambda a, b, c: D.GeneralizedPareto(a, b, c / 4), _real, _positive, _positive
        ),
        "distributions.Geometric": _calls(D.Geometric, _positive),
        "distributions.Gumbel": _calls(D.Gumbel, _real, _positive),
        "distributions.HalfCauchy": _calls(D.HalfCauchy, _positive),
        "distributions.HalfNormal": _calls(D.HalfNormal, _positive),
        "distributions.Independent": _calls(lambda a, b: D.Independent(D.Normal(a, b), 1), _real, _positive),
        "distributions.InverseGamma": _calls(lambda a, b: D.InverseGamma(a + 3, b), _positive, _positive),
        "distributions.Kumaraswamy": _calls(D.Kumaraswamy, _positive, _positive),
        "distributions.LKJCholesky": _calls(lambda x: D.LKJCholesky(3, x), lambda: positive(1)[0]),
        "distributions.Laplace": _calls(D.Laplace, _real, _positive),
        "distributions.LogNormal": _calls(D.LogNormal, _real, _positive),
        "distributions.LogisticNormal": _calls(D.LogisticNormal, _real, _positive),
        "distributions.LowRankMultivariateNormal": _calls(
            D.LowRankMultivariateNormal, _vector, lambda: real(3, 2), lambda: positive(3)
        ),
        "distributions.MixtureSameFamily": _calls(
            lambda x, a, b: D.MixtureSameFamily(D.Categorical(logits=x), D.Normal(a, b)), _real, _real, _positive
        ),
        "distributions.Multinomial": _calls(lambda x: D.Multinomial(5, logits=x), _real),
        "distributions.MultivariateNormal": [
            *_calls(D.MultivariateNormal, _vector, _covariance),
            *_calls(lambda a, b: D.MultivariateNormal(a, scale_tril=b), _vector, _triangle),
        ],
        "distributions.NegativeBinomial": _calls(lambda x: D.NegativeBinomial(5, logits=x), _real),
        "distributions.Normal": [*_calls(D.Normal, _real, _positive), *_calls(lambda x: D.Normal(x, 1.0), _real)],
        "distributions.OneHotCategorical": _calls(lambda x: D.OneHotCategorical(logits=x), _real),
        "distributions.OneHotCategoricalStraightThrough": _calls(
            lambda x: D.OneHotCategoricalStraightThrough(logits=x), _real
        ),
        "distributions.Pareto": _calls(lambda a, b: D.Pareto(a, b + 3), _positive, _positive),
        "distributions.Poisson": _calls(D.Poisson, _positive),
        "distributions.RelaxedBernoulli": _calls(lambda x: D.RelaxedBernoulli(torch.tensor(0.5), logits=x), _real),
        "distributions.RelaxedOneHotCategorical": _calls(
            lambda x: D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=x), _real
        ),
        "distributions.StudentT": _calls(lambda a, b, c: D.StudentT(a + 3, b, c), _positive, _real, _positive),
        "distributions.TransformedDistribution": _calls(
            lambda a, b: D.TransformedDistribution(
                D.Normal(a, b), [transforms.TanhTransform(cache_size=1), transforms.AffineTransform(0.5, 2.0)]
            ),
            _real,
            _positive,
        ),
        "distributions.Uniform": _calls(lambda a, b: D.Uniform(a, a + b), _real, _positive),
        "distributions.VonMises": _calls(D.VonMises, _real, _positive),
        "distributions.Weibull": _calls(D.Weibull, _positive, _positive),
        "distributions.Wishart": _calls(lambda a, b: D.Wishart(a + 4, b), lambda: positive(1)[0], _covariance),
        "distributions.kl_divergence": [
            lambda: call(
                lambda a, b, c, d: D.kl_divergence(D.Normal(a, b), D.Normal(c, d)),
                *(_real(), _positive(), _real(), _positive()),
            ),
            lambda: call(
                lambda a, b: D.kl_divergence(D.Categorical(logits=a), D.Categorical(logits=b)), _real(), _real()
            ),
            lambda: call(
                lambda a, b: D.kl_divergence(
                    D.MultivariateNormal(a, scale_tril=b), D.MultivariateNormal(a * 2, scale_tril=b)
                ),
                *(_vector(), _triangle()),
            ),
        ],
    }
)
"""The calls by full name."""

NOT_CALLED: Mapping[str, str] = MappingProxyType({"distributions.ExponentialFamily": "abstract: it has no parameters"})
