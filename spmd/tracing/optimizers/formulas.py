"""What a cone computes, found by its values: running means, and the steps of Adam and of SGD with momentum.

The constants of a formula are read off at points where it depends on one of them only. Then the cone and the formula
must agree at random points. All is float64, so a formula that differs by more than rounding does not pass.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.ir.graph import Value
from spmd.ir.number import Number
from spmd.tracing.optimizers.cone import Cone, NotComputable

_TOLERANCE = 1e-9
_FOREVER = 1e15
"""A number of steps after which no correction of a bias is left."""

_MOST_ENDS = 60


@attrs.frozen
class Gradient:
    """What a step takes for the gradient: `sign * node + decay * parameter`."""

    node: int
    sign: float = 1.0
    decay: float = 0.0


@attrs.frozen
class OptimizerStep:
    """A step of an optimizer, by nodes of the cone of the new parameter.

    Args:
        name: of the fused operator.
        param, gradient: the nodes of the old parameter and of the gradient.
        states, new_states: those of the states, old and new.
        inside: all nodes that the step computes, without the new states.
        step, rate: the 0-d values of the number of steps and of the learning rate, if they are values; the rate may be
            a dynamic number.
        options: the keyword arguments of the operator.
    """

    name: str
    param: int
    gradient: int
    states: tuple[int, ...]
    new_states: tuple[int, ...]
    inside: frozenset[int]
    step: Value | None
    rate: Value | Number | None
    options: Mapping[str, Any]

    def of(self, numbers: Mapping[Any, Any]) -> OptimizerStep:
        """The step of an equal cone, by the 0-d values there for those here."""
        return attrs.evolve(self, step=numbers.get(self.step, self.step), rate=numbers.get(self.rate, self.rate))


@attrs.frozen
class _Mean:
    """A node `decay * state + weight * gradient`, or with the square of the gradient."""

    node: int
    state: int
    gradient: int
    decay: float
    weight: float


def adam(cone: Cone, root: int) -> Iterator[OptimizerStep]:
    """The steps of Adam or AdamW that a cone is; of several, the first computes most.

    Args:
        cone: that of a new parameter.
        root: the node of a square root in it, that of the running mean of squares, perhaps corrected.
    """
    for (node,) in _ends(cone, root, 1):
        for square in filter(_is_average, _means(cone, node, power=2)):
            for number in range(1, len(cone.values)):
                for mean in filter(_is_average, _means(cone, number, power=1, of=square.gradient)):
                    yield from _adam_steps(cone, mean, square)


def _adam_steps(cone: Cone, mean: _Mean, square: _Mean) -> Iterator[OptimizerStep]:
    for param, nodes in _old_parameters(cone, mean.node, square.node):
        scalars = cone.scalars(nodes)
        steps = [scalar for scalar in scalars if isinstance(scalar, Value)]
        for step, rate in itertools.product(steps, _rates(scalars)):
            found = _fit_adam(cone, (param, mean, square), step, rate) if step is not rate else None
            if found is None:
                continue
            lr, eps, decay = found
            gradient, nodes_of_it = _gradient(cone, square.gradient, param, decayed=decay == 0.0)
            options = {
                "lr": lr, "beta1": mean.decay, "beta2": square.decay, "weight_decay": decay or gradient.decay,
                "eps": eps, "amsgrad": False, "maximize": gradient.sign < 0,
            }  # fmt: skip
            inside = (nodes | _inside(cone, mean) | _inside(cone, square) | nodes_of_it) - {mean.node, square.node}
            yield OptimizerStep(
                "_fused_adamw" if decay else "_fused_adam",
                *(param, gradient.node, (mean.state, square.state), (mean.node, square.node)),
                *(inside, step, rate, options),
            )
            break


def _rates(scalars: Sequence[Value | Number]) -> tuple[Value | Number | None, ...]:
    """What the learning rate may be: a constant, or one of these."""
    return None, *(value for value in scalars if isinstance(value, Number) or value.meta.dtype.is_floating_point)


def _is_average(mean: _Mean) -> bool:
    return 0.0 <= mean.decay < 1.0 and math.isclose(mean.weight, 1.0 - mean.decay, rel_tol=_TOLERANCE)


def _inside(cone: Cone, mean: _Mean) -> frozenset[int]:
    return cone.inside(mean.node, frozenset([mean.state, mean.gradient])) or frozenset()


def _if_computable(fit: Callable[..., Any]) -> Callable[..., Any]:
    """A fit that returns None where the given values do not determine those of the cone."""

    @functools.wraps(fit)
    def wrapped(*args: Any) -> Any:
        try:
            return fit(*args)
        except NotComputable:
            return None

    return wrapped


@_if_computable
def _fit_adam(
    cone: Cone, nodes: tuple[int, _Mean, _Mean], step: Value, rate: Value | Number | None
) -> tuple[float, float, float] | None:
    """Learning rate (1 if it is a value), eps and decoupled weight decay with which a cone is a step of Adam."""
    param, mean, square = nodes

    def new(p: Tensor, m: Tensor, v: Tensor, t: Tensor, r: Tensor) -> Tensor:
        scalars: dict[Value | Number, Tensor] = {step: t} if rate is None else {step: t, rate: r}
        return cone.evaluate(0, {param: p, mean.node: m, square.node: v}, scalars)

    zero, one, forever = _number(0.0), _number(1.0), _number(_FOREVER)
    at_one, at_zero = (-float(new(zero, one, v, forever, one)) for v in (one, zero))
    if not (at_one > 0.0 and at_zero > at_one):
        return None
    eps = 0.0 if math.isinf(at_zero) else at_one / (at_zero - at_one)
    lr = at_one * (1.0 + eps)
    kept = float(new(one, zero, one, forever, one))
    lr, eps, decay = (_short(number) for number in (lr, eps, (1.0 - kept) / lr))
    if rate is None and kept <= 0.0:
        return None  # an update with its decay, still to be added to the parameter
    if not all(map(math.isfinite, (lr, eps, decay))) or (rate is not None and lr != 1.0):
        return None
    p, m, v, t, r = _points()
    first, second = (1.0 - torch.pow(mean_.decay, t) for mean_ in (mean, square))
    speed = lr * r if rate is not None else torch.full_like(r, lr)
    update = speed / first * m / (v.sqrt() / second.sqrt() + eps)
    return (lr, eps, decay) if _agree(new(p, m, v, t, r), p * (1.0 - speed * decay), -update) else None


def momentum(cone: Cone, node: int) -> Iterator[OptimizerStep]:
    """The steps of SGD that a cone is whose momentum buffer is a node; of several, the first is the likeliest."""
    means = [mean for mean in _means(cone, node, power=1) if 0.0 < mean.decay < 1.0]
    # A mean is symmetric: the buffer is rather an input than the gradient is, and decays less.
    for mean in sorted(means, key=lambda mean: (cone.values[mean.state] in cone.producers, -mean.decay)):
        for param, nodes in _old_parameters(cone, node, mean.gradient):
            for rate in _rates(cone.scalars(nodes)):
                found = _fit_sgd(cone, param, mean, rate)
                if found is None:
                    continue
                lr, nesterov = found
                gradient, nodes_of_it = _gradient(cone, mean.gradient, param)
                options = {
                    "weight_decay": gradient.decay, "momentum": mean.decay, "lr": lr,
                    "dampening": _short(1.0 - mean.weight), "nesterov": nesterov, "maximize": gradient.sign < 0,
                    "is_first_step": False,
                }  # fmt: skip
                inside = (nodes | _inside(cone, mean) | nodes_of_it) - {node}
                yield OptimizerStep(
                    "_fused_sgd", param, gradient.node, (mean.state,), (node,), inside, None, rate, options
                )
                break


@_if_computable
def _fit_sgd(cone: Cone, param: int, mean: _Mean, rate: Value | Number | None) -> tuple[float, bool] | None:
    """Learning rate (1 if it is a value), and whether Nesterov's, with which a cone is a step of SGD."""

    def new(p: Tensor, g: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return cone.evaluate(0, {param: p, mean.gradient: g, mean.node: b}, {} if rate is None else {rate: r})

    zero, one = _number(0.0), _number(1.0)
    by_gradient, by_buffer = (-float(new(zero, g, b, one)) for g, b in ((one, zero), (zero, one)))
    nesterov = by_gradient != 0.0
    lr = _short(by_gradient if nesterov else by_buffer)
    if not 0.0 < lr < math.inf or (rate is not None and lr != 1.0):
        return None
    p, g, b, _, r = _points()
    speed = lr * r if rate is not None else torch.full_like(r, lr)
    step = g + mean.decay * b if nesterov else b
    return (lr, nesterov) if _agree(new(p, g, b, r), p, -speed * step) else None


def _means(cone: Cone, node: int, power: int, of: int | None = None) -> Iterator[_Mean]:
    """The ways in which a node is `decay * state + weight * gradient**power`; `of` is the gradient, if it is known."""
    zero, one = _number(0.0), _number(1.0)
    for pair in _ends(cone, node, 2):
        for state, gradient in itertools.permutations(sorted(pair)):
            if of not in (None, gradient):
                continue
            new = lambda s, g, nodes=(state, gradient): cone.evaluate(node, dict(zip(nodes, (s, g), strict=True)))  # noqa: E731
            try:
                decay, weight = _short(float(new(one, zero))), float(new(zero, one))
                s, g, *_ = _points()
                if weight > 0.0 and _agree(new(s, g), decay * s, weight * g**power):
                    yield _Mean(node, state, gradient, decay, weight)
            except NotComputable:
                continue


def _gradient(cone: Cone, node: int, param: int, decayed: bool = True) -> tuple[Gradient, frozenset[int]]:
    """A gradient with weight decay (if `decayed`) or another sign as what it is made of, and the nodes between."""
    zero, one = _number(0.0), _number(1.0)
    g, p, *_ = _points()
    found = [(Gradient(node), frozenset[int]())]
    counts = (1, 2) if decayed else (1,)
    for ends in itertools.chain.from_iterable(_ends(cone, node, count) for count in counts):
        for gradient in ends - {param} if (param in ends) == (len(ends) == 2) else ():
            new = lambda g, p, gradient=gradient: cone.evaluate(node, {gradient: g, param: p})  # noqa: E731
            try:
                sign, decay = float(new(one, zero)), _short(float(new(zero, one)))
                if abs(sign) == 1.0 and decay >= 0.0 and _agree(new(g, p), sign * g, decay * p):
                    found.append((Gradient(gradient, sign, decay), cone.inside(node, ends) or frozenset()))
            except NotComputable:
                continue
    return max(found, key=lambda pair: len(pair[1]))


def _old_parameters(cone: Cone, *given: int) -> Iterator[tuple[int, frozenset[int]]]:
    """Nodes with which, and with the given ones, the new parameter can be computed; with the nodes that compute it.

    Those from which most is computed come first: a decay of the parameter is a part of the step.
    """
    found = []
    for node in range(1, len(cone.values)):
        producer = cone.producers.get(cone.values[node])
        if producer is not None and not producer.operands:
            continue  # zeros are no parameter
        nodes = cone.inside(0, frozenset([node, *given])) if node not in given else None
        if nodes is not None and any(node in cone.operands(other) for other in nodes):
            found.append((node, nodes))
    yield from sorted(found, key=lambda pair: (-len(pair[1]), pair[0]))


def _ends(cone: Cone, root: int, count: int) -> Iterator[frozenset[int]]:
    """The sets of `count` nodes that a node can be computed from, nearest first."""
    found = [frozenset([root])]
    for ends in found:  # `found` grows
        if len(ends) == count and root not in ends:
            yield ends
        for node in sorted(ends) if len(found) < _MOST_ENDS else ():
            operands = frozenset(cone.operands(node))
            further = (ends - {node}) | operands
            if operands and len(further) <= count + 1 and further not in found:
                found.append(further)


def _number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@functools.lru_cache(maxsize=1)
def _points() -> tuple[Tensor, ...]:
    """Random parameters, means or gradients, mean squares, steps and learning rates; large and small ones.

    Every other parameter is 0, to see the update alone.
    """
    generator, count = torch.Generator().manual_seed(0), 128
    signs = torch.randn(2, count, generator=generator, dtype=torch.float64).sign()
    uniform = torch.rand(4, count, generator=generator, dtype=torch.float64)
    p, m = signs * 10.0 ** (16 * uniform[:2] - 8)
    steps = torch.randint(1, 200, (count,), generator=generator).double()
    return p * (torch.arange(count) % 2), m, 10.0 ** (40 * uniform[2] - 24), steps, uniform[3]


def _agree(found: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether numbers are the sum of two, up to rounding of each."""
    return bool(((found - one - other).abs() <= _TOLERANCE * (one.abs() + other.abs())).all())


def _short(number: float) -> float:
    """The number of few digits of which the given one is a rounded result, if there is one."""
    if not math.isfinite(number):
        return number
    short = float(f"{number:.8g}")
    return short if math.isclose(number, short, rel_tol=1e-10) else number
