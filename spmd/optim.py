"""Small functional optimizers on pytrees: the state is an argument and a result, and nothing is mutated.

An `Optimizer` is a pair of pure functions, as in optax, but `update` returns the new parameters and not a difference:

    optimizer = adamw(lr=1e-3)
    state = optimizer.init(params)
    params, state = optimizer.update(params, state, grads)

Updates are elementwise apart from a few scalars, so under `jit` they need no collective if parameters, state and
gradients have the same sharding. Leaves are updated by `torch._foreach_*`: a step is a few list operators for any
number of parameters. `jit` replaces them by torch's fused optimizers, which write to donated arguments in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import attrs
import torch
from torch import Tensor

from spmd.core.pytree import tree_flatten, tree_leaves, tree_map, tree_structure
from spmd.errors import SpmdError

aten = torch.ops.aten

Tree: TypeAlias = Any
"""A pytree of floating-point tensors."""


@attrs.frozen
class Optimizer:
    """A pair of pure functions.

    Args:
        init: `init(params) -> state`: the state before the first step.
        update: `update(params, state, grads) -> (params, state)`: one step. `grads` is a pytree like `params`; if the
            structures differ, it raises a SpmdError.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]


class SgdState(NamedTuple):
    """The state of `sgd`: momentum buffers shaped like the parameters, or None without momentum."""

    momentum: Tree


class AdamWState(NamedTuple):
    """The state of `adamw`.

    Fields:
        step: the number of steps taken, 0-d int64.
        mean: running mean of the gradients, shaped like the parameters.
        square: running mean of their squares, shaped like the parameters.
    """

    step: Tensor
    mean: Tree
    square: Tree


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Fields:
        params: the parameters in more bits, shaped like them.
        inner: the state of the optimizer that updates them.
    """

    params: Tree
    inner: Any


def sgd(lr: float | Tensor, momentum: float = 0.0, *, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """Stochastic gradient descent, as `torch.optim.SGD`.

    Args:
        lr: the learning rate, a number or a 0-d tensor. To change it from step to step, make the optimizer inside the
            jitted function from a tensor that is an argument.
        momentum: the decay of the momentum buffer; 0 keeps no buffer.
        nesterov: use Nesterov momentum.
        weight_decay: `weight_decay * parameter` is added to the gradient.

    Raises:
        SpmdError: `nesterov` without momentum.

    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> optimizer = sgd(lr=0.5)
    >>> params, state = optimizer.update(params, optimizer.init(params), {"w": torch.tensor([1.0, -1.0])})
    >>> params
    {'w': tensor([0.5000, 2.5000])}
    """
    if nesterov and momentum == 0.0:
        raise SpmdError("sgd(nesterov=True) needs momentum (got momentum=0.0). Pass momentum=0.9.")

    def init(params: Tree) -> SgdState:
        return SgdState(_zeros_like(params) if momentum else None)

    def update(params: Tree, state: SgdState, grads: Tree) -> tuple[Tree, SgdState]:
        spec = tree_structure(params)
        weights = _leaves_like(spec, params, "params")
        if not weights:
            return params, state
        steps = _leaves_like(spec, grads, "grads")
        if weight_decay:
            steps = torch._foreach_add(steps, weights, alpha=weight_decay)
        if momentum:
            buffers = torch._foreach_mul(_leaves_like(spec, state.momentum, "state.momentum"), momentum)
            buffers = torch._foreach_add(buffers, steps)
            steps = torch._foreach_add(steps, buffers, alpha=momentum) if nesterov else buffers
            state = SgdState(spec.unflatten(buffers))
        return spec.unflatten(torch._foreach_sub(weights, _scale(steps, lr))), state

    return Optimizer(init, update)


def adamw(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Adam with decoupled weight decay, as `torch.optim.AdamW`; plain Adam where `weight_decay` is 0 (the default).

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019. The bias corrections are combined into two
    scalars, so their cost does not depend on the number of parameters.

    Args:
        lr: the learning rate, a number or a 0-d tensor. To change it from step to step, make the optimizer inside the
            jitted function from a tensor that is an argument.
        b1: decay of the running mean of gradients.
        b2: decay of the running mean of squared gradients.
        eps: added to the denominator.
        weight_decay: each step multiplies the parameters by `1 - lr * weight_decay`.

    >>> params = [torch.tensor([1.0, 2.0])]
    >>> optimizer = adamw(lr=0.1)
    >>> params, state = optimizer.update(params, optimizer.init(params), [torch.tensor([3.0, -3.0])])
    >>> params, state.step
    ([tensor([0.9000, 2.1000])], tensor(1))
    """

    def init(params: Tree) -> AdamWState:
        return AdamWState(torch.zeros((), dtype=torch.int64), _zeros_like(params), _zeros_like(params))

    def update(params: Tree, state: AdamWState, grads: Tree) -> tuple[Tree, AdamWState]:
        spec = tree_structure(params)
        weights = _leaves_like(spec, params, "params")
        if not weights:
            return params, state
        slopes = _leaves_like(spec, grads, "grads")
        mean = torch._foreach_mul(_leaves_like(spec, state.mean, "state.mean"), b1)
        mean = torch._foreach_add(mean, slopes, alpha=1 - b1)
        square = torch._foreach_mul(_leaves_like(spec, state.square, "state.square"), b2)
        square = torch._foreach_addcmul(square, slopes, slopes, value=1 - b2)

        # m / c1 / (sqrt(v / c2) + eps) = (sqrt(c2) / c1) * m / (sqrt(v) + eps * sqrt(c2)), c the bias corrections.
        step = state.step + 1
        root = _bias_correction(b2, step).sqrt()
        dtype = torch.float64 if all(x.dtype == torch.float64 for x in weights) else torch.get_default_dtype()
        denominators = aten._foreach_add.Tensor(torch._foreach_sqrt(square), (root * eps).to(dtype))
        rate = (lr * root / _bias_correction(b1, step)).to(dtype)
        steps = _scale(torch._foreach_div(mean, denominators), rate)
        if weight_decay:
            weights = _scale(weights, 1 - lr * weight_decay)
        new = AdamWState(step, spec.unflatten(mean), spec.unflatten(square))
        return spec.unflatten(torch._foreach_sub(weights, steps)), new

    return Optimizer(init, update)


def global_norm(tree: Tree) -> Tensor:
    """The Euclidean norm of all leaves taken together, 0-d.

    The squares of all leaves are summed before the root, so for sharded leaves one scalar is reduced, not one per leaf.

    Raises:
        SpmdError: a pytree without leaves.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
    tensor(5.)
    """
    leaves = tree_leaves(tree)
    if not leaves:
        raise SpmdError("global_norm needs at least one tensor (got an empty pytree).")
    total = leaves[0].square().sum()
    for leaf in leaves[1:]:
        total = total + leaf.square().sum()
    return total.sqrt()


def clip_by_global_norm(max_norm: float, optimizer: Optimizer) -> Optimizer:
    """`optimizer` with gradients scaled down to a global norm of at most `max_norm`.

    The scale is that of `torch.nn.utils.clip_grad_norm_`. The state is that of `optimizer`.

    Raises:
        SpmdError: `max_norm` is not positive.

    >>> optimizer = clip_by_global_norm(1.0, sgd(lr=1.0))
    >>> params = torch.zeros(2)
    >>> params, _ = optimizer.update(params, optimizer.init(params), torch.tensor([3.0, 4.0]))
    >>> params
    tensor([-0.6000, -0.8000])
    """
    if not max_norm > 0:
        raise SpmdError(f"clip_by_global_norm needs a positive max_norm (got {max_norm!r}).")

    def update(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        leaves, spec = tree_flatten(grads)
        if leaves:
            # 1e-6 as in torch: without it, a gradient of zeros would be divided by zero.
            scale = (max_norm / (global_norm(grads) + 1e-6)).clamp(max=1.0)
            grads = spec.unflatten(_scale(tuple(leaves), scale))
        return optimizer.update(params, state, grads)

    return Optimizer(optimizer.init, update)


def master_weights(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Optimizer:
    """`optimizer` on a copy of the parameters in a dtype with more bits, for parameters in bfloat16 or float16.

    A step of a small learning rate is lost where it is rounded to the bits of such a parameter; the copy keeps it, and
    the parameters are the copy, rounded. Gradients are cast to `dtype`; under `jit(..., reduce_dtype=dtype)` they are
    reduced in it, too. Micikevicius et al., "Mixed precision training" (2018).

    Args:
        optimizer: what updates the copy.
        dtype: the dtype of the copy, and of the state of `optimizer`.

    Returns:
        An optimizer whose state is a `MasterWeightsState`.

    Raises:
        SpmdError: `dtype` is no floating dtype.

    >>> params = torch.ones(2, dtype=torch.bfloat16)
    >>> optimizer = master_weights(sgd(lr=1e-3))
    >>> state = optimizer.init(params)
    >>> for _ in range(4):
    ...     params, state = optimizer.update(params, state, torch.ones_like(params))
    >>> params, state.params
    (tensor([0.9961, 0.9961], dtype=torch.bfloat16), tensor([0.9960, 0.9960]))
    """
    if not dtype.is_floating_point:
        raise SpmdError(f"master_weights needs a floating dtype (got {dtype}).")

    def init(params: Tree) -> MasterWeightsState:
        copied = tree_map(lambda leaf: leaf.to(dtype, copy=True), params)
        return MasterWeightsState(copied, optimizer.init(copied))

    def update(params: Tree, state: MasterWeightsState, grads: Tree) -> tuple[Tree, MasterWeightsState]:
        spec, slopes = tree_structure(params), tree_map(lambda leaf: leaf.to(dtype), grads)
        copied, inner = optimizer.update(state.params, state.inner, slopes)
        pairs = zip(_leaves_like(spec, copied, "state.params"), _leaves_like(spec, params, "params"), strict=True)
        return spec.unflatten(copy.to(weight.dtype) for copy, weight in pairs), MasterWeightsState(copied, inner)

    return Optimizer(init, update)


def _bias_correction(decay: float, step: Tensor) -> Tensor:
    """`1 - decay**step` in float64, by expm1: in the first steps the difference would lose half of its digits."""
    step = step.double()
    return -torch.expm1(step * math.log(decay)) if decay else torch.ones_like(step)


def _scale(tensors: tuple[Tensor, ...], factor: float | Tensor) -> tuple[Tensor, ...]:
    # torch._foreach_mul would convert a 0-d tensor to a number, which synchronizes a device and cannot be traced.
    if isinstance(factor, Tensor):
        return aten._foreach_mul.Tensor(tensors, factor)
    return torch._foreach_mul(tensors, factor)


def _zeros_like(tree: Tree) -> Tree:
    return tree_map(torch.zeros_like, tree)


def _leaves_like(spec: Any, tree: Tree, what: str) -> tuple[Tensor, ...]:
    leaves, found = tree_flatten(tree)
    if found != spec:
        raise SpmdError(
            f"{what} must be a pytree like params: expected {spec} (got {found}). "
            "Pass the gradients of these params, and the state that init made from them."
        )
    return tuple(leaves)
