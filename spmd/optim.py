"""Small functional optimizers on pytrees: the state is an argument and a result, and nothing is mutated.

The convention is that of optax and TorchOpt: `update` returns what `apply_updates` adds to the parameters, and `step`
does both.

    optimizer = adamw(lr=1e-3)
    state = optimizer.init(params)
    params, state = optimizer.step(params, state, grads)

Updates are elementwise apart from a few scalars, so under `jit` they need no collective if parameters, state and
gradients have the same sharding. Leaves are updated by `torch._foreach_*`: a step is a few list operators for any
number of parameters. `jit` replaces them by torch's fused optimizers, which write to donated arguments in place; it
does so for a step, and for updates that are read by `apply_updates` only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Generic, cast

import attrs
import torch
from torch import Tensor
from typing_extensions import NamedTuple, ParamSpec, TypeVar

from spmd.core.pytree import tree_flatten, tree_leaves, tree_map, tree_structure
from spmd.errors import SpmdError
from spmd.ir.source import Source
from spmd.tracing.source import user_source, warn_at

aten = torch.ops.aten

_State = TypeVar("_State", default=Any)
_Tree = TypeVar("_Tree")  # a pytree of floating-point tensors
_Step = TypeVar("_Step", default=Tensor)  # or its spec
_Moments = TypeVar("_Moments", default=object)  # a pytree like the parameters, or their specs
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


_ORDER = (
    "update takes optax's order, `updates, state = update(grads, state, params)`. Before, it was `params, state = "
    "update(params, state, grads)`, which is `step(params, state, grads)` now. Call step, or name the arguments: "
    "update(grads=grads, state=state, params=params)."
)


def _warns_of_order(update: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A method that warns, once for each line, of arguments by position: their order was another one."""
    warned: set[Source | None] = set()

    @functools.wraps(update)
    def call(*args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        if len(args) > 1 and (source := user_source()) not in warned:  # the first one is the optimizer
            warn_at(_ORDER, source, FutureWarning)
            warned.add(source)
        return update(*args, **keywords)

    return call


@attrs.frozen
class Optimizer(Generic[_State]):
    """An optimizer: pure functions of pytrees, by the convention of optax.

    Args:
        init: `init(params) -> state`: the state before the first step.
        update: `update(grads, state, params) -> (updates, state)`; see the method.
        step: `step(params, state, grads) -> (params, state)`, where it is more than `update` and `apply_updates`.
    """

    init: Callable[[object], _State]
    _update: Callable[[Any, _State, Any], tuple[Any, _State]]
    _step: Callable[[Any, _State, Any], tuple[Any, _State]] | None = None

    @_warns_of_order
    def update(self, grads: _Tree, state: _State, params: object = None) -> tuple[_Tree, _State]:
        """The updates, which `apply_updates` adds to the parameters, and the new state.

        A call by position warns, once for each line: the order of the arguments was another one in earlier versions.

        Args:
            grads: a pytree like `params`.
            state: that of the step before, or of `init`.
            params: the parameters; optimizers that do not read them can do without.

        Raises:
            SpmdError: the structures differ, or parameters are needed.

        >>> optimizer = sgd(lr=0.5)
        >>> params, grads = torch.tensor([1.0, 2.0]), torch.tensor([1.0, -1.0])
        >>> updates, state = optimizer.update(grads=grads, state=optimizer.init(params), params=params)
        >>> updates, apply_updates(params, updates)
        (tensor([-0.5000,  0.5000]), tensor([0.5000, 2.5000]))
        """
        updates, state = self._update(grads, state, params)
        return cast("_Tree", updates), state

    def step(self, params: _Tree, state: _State, grads: object) -> tuple[_Tree, _State]:
        """The parameters and the state after one step.

        Args:
            params: the parameters.
            state: that of the step before, or of `init`.
            grads: a pytree like `params`.

        Raises:
            SpmdError: the structures differ.
        """
        if self._step is not None:
            params, state = self._step(params, state, grads)
            return params, state
        updates, state = self._update(grads, state, params)
        return apply_updates(params, updates), state


def apply_updates(params: _Tree, updates: object) -> _Tree:
    """The sum of parameters and updates, in the dtypes of the parameters; as `optax.apply_updates`.

    Args:
        params: a pytree of tensors.
        updates: a pytree like `params`, as `Optimizer.update` returns it.

    Raises:
        SpmdError: the structures differ.
    """
    spec = tree_structure(params)
    weights = _leaves_like(spec, params, "params")
    if not weights:
        return params
    sums = torch._foreach_add(weights, _leaves_like(spec, updates, "updates"))
    return cast("_Tree", spec.unflatten(x.to(weight.dtype) for x, weight in zip(sums, weights, strict=True)))


class SgdState(NamedTuple, Generic[_Moments]):
    """The state of `sgd`: momentum buffers shaped like the parameters, or None without momentum."""

    momentum: _Moments


class AdamWState(NamedTuple, Generic[_Step, _Moments]):
    """The state of `adamw`.

    Fields:
        step: the number of steps taken, 0-d int64.
        mean: running mean of the gradients, shaped like the parameters.
        square: running mean of their squares, shaped like the parameters.
    """

    step: _Step
    mean: _Moments
    square: _Moments


class MasterWeightsState(NamedTuple, Generic[_State, _Moments]):
    """The state of `master_weights`.

    Fields:
        params: the parameters in more bits, shaped like them.
        inner: the state of the optimizer that updates them.
    """

    params: _Moments
    inner: _State


def sgd(
    lr: float | Tensor, momentum: float = 0.0, *, nesterov: bool = False, weight_decay: float = 0.0
) -> Optimizer[SgdState]:
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
    >>> params, state = optimizer.step(params, optimizer.init(params), {"w": torch.tensor([1.0, -1.0])})
    >>> params
    {'w': tensor([0.5000, 2.5000])}
    """
    if nesterov and momentum == 0.0:
        raise SpmdError("sgd(nesterov=True) needs momentum (got momentum=0.0). Pass momentum=0.9.")

    def init(params: Any) -> SgdState:
        return SgdState(_zeros_like(params) if momentum else None)

    def update(grads: Any, state: SgdState, params: Any) -> tuple[Any, SgdState]:
        spec, steps, weights = _operands(grads, params, "sgd" if weight_decay else None)
        if not steps:
            return grads, state
        if weight_decay:
            steps = torch._foreach_add(steps, weights, alpha=weight_decay)
        if momentum:
            buffers = torch._foreach_mul(_leaves_like(spec, state.momentum, "state.momentum"), momentum)
            buffers = torch._foreach_add(buffers, steps)
            steps = torch._foreach_add(steps, buffers, alpha=momentum) if nesterov else buffers
            state = SgdState(spec.unflatten(buffers))
        return spec.unflatten(_scale(steps, -lr)), state

    return Optimizer(init, update)


def adamw(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer[AdamWState]:
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
    >>> params, state = optimizer.step(params, optimizer.init(params), [torch.tensor([3.0, -3.0])])
    >>> params, state.step
    ([tensor([0.9000, 2.1000])], tensor(1))
    """

    def init(params: Any) -> AdamWState:
        return AdamWState(torch.zeros((), dtype=torch.int64), _zeros_like(params), _zeros_like(params))

    def update(grads: Any, state: AdamWState, params: Any) -> tuple[Any, AdamWState]:
        spec, slopes, weights = _operands(grads, params, "adamw" if weight_decay else None)
        if not slopes:
            return grads, state
        mean = torch._foreach_mul(_leaves_like(spec, state.mean, "state.mean"), b1)
        mean = torch._foreach_add(mean, slopes, alpha=1 - b1)
        square = torch._foreach_mul(_leaves_like(spec, state.square, "state.square"), b2)
        square = torch._foreach_addcmul(square, slopes, slopes, value=1 - b2)

        # m / c1 / (sqrt(v / c2) + eps) = (sqrt(c2) / c1) * m / (sqrt(v) + eps * sqrt(c2)), c the bias corrections.
        step = state.step + 1
        root = _bias_correction(b2, step).sqrt()
        dtype = torch.float64 if all(x.dtype == torch.float64 for x in mean) else torch.get_default_dtype()
        denominators = aten._foreach_add.Tensor(torch._foreach_sqrt(square), (root * eps).to(dtype))
        rate = (-lr * root / _bias_correction(b1, step)).to(dtype)
        updates = _scale(torch._foreach_div(mean, denominators), rate)
        if weight_decay:
            updates = torch._foreach_add(updates, _scale(weights, -lr * weight_decay))
        return spec.unflatten(updates), AdamWState(step, spec.unflatten(mean), spec.unflatten(square))

    return Optimizer(init, update)


def global_norm(tree: object) -> Tensor:
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


def clip_by_global_norm(max_norm: float, optimizer: Optimizer[_State]) -> Optimizer[_State]:
    """`optimizer` with gradients scaled down to a global norm of at most `max_norm`.

    The scale is that of `torch.nn.utils.clip_grad_norm_`. The state is that of `optimizer`.

    Raises:
        SpmdError: `max_norm` is not positive.

    >>> optimizer = clip_by_global_norm(1.0, sgd(lr=1.0))
    >>> params = torch.zeros(2)
    >>> params, _ = optimizer.step(params, optimizer.init(params), torch.tensor([3.0, 4.0]))
    >>> params
    tensor([-0.6000, -0.8000])
    """
    if not max_norm > 0:
        raise SpmdError(f"clip_by_global_norm needs a positive max_norm (got {max_norm!r}).")

    def clip(grads: Any) -> Any:
        leaves, spec = tree_flatten(grads)
        if not leaves:
            return grads
        # 1e-6 as in torch: without it, a gradient of zeros would be divided by zero.
        scale = (max_norm / (global_norm(grads) + 1e-6)).clamp(max=1.0)
        return spec.unflatten(_scale(tuple(leaves), scale))

    def update(grads: Any, state: _State, params: Any) -> tuple[Any, _State]:
        return optimizer.update(grads=clip(grads), state=state, params=params)

    def step(params: Any, state: _State, grads: Any) -> tuple[Any, _State]:
        return optimizer.step(params, state, clip(grads))

    return Optimizer(optimizer.init, update, step)


def master_weights(
    optimizer: Optimizer[_State], dtype: torch.dtype = torch.float32
) -> Optimizer[MasterWeightsState[_State]]:
    """`optimizer` on a copy of the parameters in a dtype with more bits, for parameters in bfloat16 or float16.

    A step of a small learning rate is lost where it is rounded to the bits of such a parameter; the copy keeps it, and
    the parameters are the copy, rounded. Gradients are cast to `dtype`; under `jit(..., reduce_dtype=dtype)` they are
    reduced in it, too. Micikevicius et al., "Mixed precision training" (2018).

    Args:
        optimizer: what updates the copy.
        dtype: the dtype of the copy, and of the state of `optimizer`.

    Returns:
        An optimizer whose state is a `MasterWeightsState`; its updates are of `dtype`, and lead to the rounded copy.

    Raises:
        SpmdError: `dtype` is no floating dtype.

    >>> params = torch.ones(2, dtype=torch.bfloat16)
    >>> optimizer = master_weights(sgd(lr=1e-3))
    >>> state = optimizer.init(params)
    >>> for _ in range(4):
    ...     params, state = optimizer.step(params, state, torch.ones_like(params))
    >>> params, state.params
    (tensor([0.9961, 0.9961], dtype=torch.bfloat16), tensor([0.9960, 0.9960]))
    """
    if not dtype.is_floating_point:
        raise SpmdError(f"master_weights needs a floating dtype (got {dtype}).")

    def init(params: Any) -> MasterWeightsState[_State]:
        copied = tree_map(lambda leaf: leaf.to(dtype, copy=True), params)
        return MasterWeightsState(copied, optimizer.init(copied))

    def move(
        grads: Any, state: MasterWeightsState[_State], params: Any, change: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Any, MasterWeightsState[_State]]:
        """One step, and what `change` makes of each copy and its parameter."""
        spec, slopes, weights = _operands(grads, params, "master_weights")
        copied, inner = optimizer.step(state.params, state.inner, spec.unflatten(x.to(dtype) for x in slopes))
        copies = _leaves_like(spec, copied, "state.params")
        return spec.unflatten(map(change, copies, weights)), MasterWeightsState(copied, inner)

    def update(grads: Any, state: MasterWeightsState[_State], params: Any) -> tuple[Any, MasterWeightsState[_State]]:
        return move(grads, state, params, torch.sub)

    def step(params: Any, state: MasterWeightsState[_State], grads: Any) -> tuple[Any, MasterWeightsState[_State]]:
        return move(grads, state, params, lambda copy, weight: copy.to(weight.dtype))

    return Optimizer(init, update, step)


def _bias_correction(decay: float, step: Tensor) -> Tensor:
    """`1 - decay**step` in float64, by expm1: in the first steps the difference would lose half of its digits."""
    step = step.double()
    return -torch.expm1(step * math.log(decay)) if decay else torch.ones_like(step)


def _scale(tensors: tuple[Tensor, ...], factor: float | Tensor) -> tuple[Tensor, ...]:
    # torch._foreach_mul would convert a 0-d tensor to a number, which synchronizes a device and cannot be traced.
    if isinstance(factor, Tensor):
        return aten._foreach_mul.Tensor(tensors, factor)
    return torch._foreach_mul(tensors, factor)


def _zeros_like(tree: Any) -> Any:
    return tree_map(torch.zeros_like, tree)


def _operands(grads: Any, params: Any, reader: str | None) -> tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The structure of the parameters, and the leaves of gradients and of parameters.

    Args:
        grads: the gradients.
        params: the parameters, or None.
        reader: the optimizer, if it reads the parameters.
    """
    if params is None and reader:
        raise SpmdError(f"{reader} reads the parameters (got params=None). Pass them: update(grads, state, params).")
    spec = tree_structure(grads if params is None else params)
    return spec, _leaves_like(spec, grads, "grads"), () if params is None else _leaves_like(spec, params, "params")


def _leaves_like(spec: Any, tree: Any, what: str) -> tuple[Tensor, ...]:
    leaves, found = tree_flatten(tree)
    if found != spec:
        raise SpmdError(
            f"{what} must be a pytree like params: expected {spec} (got {found}). "
            "Pass the gradients and updates of these params, and the state that init made from them."
        )
    return tuple(leaves)
