"""Flat functions under transforms from outside: autograd, and `torch.func` with grad, vjp, jvp and vmap.

Each transform of a planned function runs as a program (`planned_function`). Second derivatives, and vmap over
pullbacks, compute forward values again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)

from spmd.api.transforms.flat_function import FlatFunction, replaced
from spmd.api.transforms.planned_function import SavesResiduals, run
from spmd.api.values.dtensor import DTensor
from spmd.core.value_types import is_continuous
from spmd.job.torch_compile import never_compiled
from spmd.runtime.torch_settings import drawing_from, generator_state
from spmd.tracing.active_transforms import unwrapped

_any_requires_grad = torch._C._any_requires_grad  # type: ignore[attr-defined]


AnyFunction: TypeAlias = FlatFunction[Any, Any]

Pull: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Of which arguments gradients are wanted, of which results there are cotangents, and which gradients are plain."""


def is_transformed(leaves: Sequence[Any]) -> bool:
    """Whether a transform from outside acts on a tensor, or autograd records what is computed from it."""
    if torch.is_grad_enabled() and _any_requires_grad(*leaves):
        return True
    if peek_interpreter_stack() is None:
        return False
    return any(isinstance(leaf, torch.Tensor) and is_functorch_wrapped_tensor(leaf) for leaf in leaves)


def without_transforms(leaf: torch.Tensor) -> torch.Tensor:
    """The tensor in which an argument has its values, of a whole batch for one that is batched."""
    return unwrapped(leaf)  # type: ignore[no-any-return]


def call(function: AnyFunction, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Call a function on tensors on which transforms may act."""
    state = generator_state(function.mesh.device) if function.is_random else None
    return _apply(function, leaves, Draws(state, replayed=False))


def _apply(function: AnyFunction, leaves: Sequence[torch.Tensor], draws: Draws) -> Sequence[torch.Tensor]:
    """As `call`, with given random numbers."""
    stack = get_interpreter_stack() or ()
    batched = any(level.key() == TransformType.Vmap for level in stack)
    wanted = tuple(n for n, leaf in enumerate(leaves) if leaf.requires_grad)
    node = function.saving(wanted, plain_among(leaves, wanted)) if wanted and not batched else function
    results = _FlatCall.apply(node, draws, *leaves)  # type: ignore[no-untyped-call]
    return results[: len(results) - len(node.residuals)]  # type: ignore[no-any-return]


def plain_among(leaves: Sequence[Any], wanted: Sequence[int]) -> tuple[int, ...]:
    """Those of the numbers `wanted` that have plain tensors on which no transform of torch.func acts.

    Their gradients are plain, too.
    """
    return tuple(n for n in wanted if not (isinstance(leaves[n], DTensor) or is_functorch_wrapped_tensor(leaves[n])))


def gradients_of(leaves: Sequence[torch.Tensor], wanted: Sequence[int], found: Sequence[Any]) -> list[Any]:
    """The gradients of all leaves from those of some, each on the device of its leaf."""
    pairs = zip(wanted, found, strict=True)
    moved = [None if value is None else value.to(leaves[number].device) for number, value in pairs]
    return replaced([None] * len(leaves), wanted, moved)


@attrs.frozen(eq=False)
class Draws:
    """The random numbers of a call: a transform that computes forward values again must draw the same.

    Args:
        state: that of the default generator before the call; None if it draws nothing.
        replayed: whether the call draws from this state, and leaves the generator as it is.
    """

    state: torch.Tensor | None
    replayed: bool

    @property
    def again(self) -> Draws:
        """The same numbers, drawn again."""
        return Draws(self.state, replayed=True)

    def run(self, node: AnyFunction | SavesResiduals, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run a program with these numbers."""
        if self.state is None or not self.replayed:
            return node.run(leaves)
        with drawing_from(self.state, _function_of(node).mesh.device):
            return node.run(leaves)


def _function_of(node: AnyFunction | SavesResiduals) -> AnyFunction:
    """The function of a call: one that saves residuals is that of another."""
    return node.function if isinstance(node, SavesResiduals) else node


class _FlatCall(torch.autograd.Function):
    """A call of a flat function, or of one that saves residuals."""

    @staticmethod
    def forward(node: AnyFunction | SavesResiduals, draws: Draws, *leaves: torch.Tensor) -> Any:
        return tuple(draws.run(node, leaves))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        node, draws, *leaves = inputs
        ctx.node, ctx.draws, ctx.count = node, draws.again, len(leaves)
        ctx.outputs, ctx.results = len(output), len(output) - len(node.residuals)
        ctx.continuous = tuple(n for n, value in enumerate(output[: ctx.results]) if is_continuous(value.dtype))
        ctx.mark_non_differentiable(*(value for n, value in enumerate(output) if n not in ctx.continuous))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves, *(output if isinstance(node, SavesResiduals) else ()))
        ctx.save_for_forward(*leaves)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        node, cotangents = ctx.node, cotangents[: ctx.results]
        given = tuple(n for n, value in enumerate(cotangents) if value is not None)
        wanted = tuple(n for n, needed in enumerate(ctx.needs_input_grad[2:]) if needed)
        values = [value for value in cotangents if value is not None]
        if not given or not wanted:
            return (None,) * (ctx.count + 2)
        saved = ctx.saved_tensors  # read once: checkpoints allow no more
        leaves, outputs = saved[: ctx.count], saved[ctx.count :]
        pull = wanted, given, plain_among(leaves, wanted)
        if isinstance(node, SavesResiduals) and not node.backward(*pull).is_random:
            found = _Pull.apply(node, ctx.draws, pull, *leaves, *values, *outputs)  # type: ignore[no-untyped-call]
            unused = node.backward(*pull).unused
            found = [None if number in unused else value for number, value in enumerate(found)]
        else:
            found = _apply(_function_of(node).pullback(*pull), [*leaves, *values], ctx.draws)
        return None, None, *gradients_of(leaves, wanted, found)

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, *tangents: torch.Tensor | None) -> Any:
        given = tuple(n for n, tangent in enumerate(tangents) if tangent is not None)
        directions = [tangent for tangent in tangents if tangent is not None]
        pushforward = _function_of(ctx.node).pushforward(given, ctx.continuous)
        moved = _apply(pushforward, [*ctx.saved_tensors[: ctx.count], *directions], ctx.draws)
        return tuple(replaced([None] * ctx.outputs, ctx.continuous, moved))

    @staticmethod
    def vmap(info: Any, in_dims: Any, node: AnyFunction, draws: Draws, *leaves: torch.Tensor) -> Any:
        randomness = "same" if draws.replayed else info.randomness
        results = _over_batch(node, draws, info.batch_size, randomness, in_dims[2:], leaves)
        return results, (0,) * len(results)


class _Pull(torch.autograd.Function):
    """A call of a backward program: on arguments, cotangents, and then results and residuals."""

    @staticmethod
    def forward(node: SavesResiduals, draws: Draws, pull: Pull, *tensors: torch.Tensor) -> Any:
        backward, given, count = node.backward(*pull), pull[1], node.joint.primals
        kept = (*tensors[:count], *tensors[count + len(given) :])
        cotangents = tensors[count : count + len(given)]
        return tuple(run(backward.program, [*(kept[number] for number in backward.reads), *cotangents], backward.plain))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        node, ctx.draws, pull, *tensors = inputs
        ctx.node, ctx.pull, ctx.total = node, pull, len(tensors)
        ctx.count = node.joint.primals + len(pull[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[: ctx.count])
        ctx.save_for_forward(*tensors[: ctx.count])

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        pullback = ctx.node.function.pullback(*ctx.pull)
        given = tuple(n for n, value in enumerate(cotangents) if value is not None)
        wanted = tuple(n for n, needed in enumerate(ctx.needs_input_grad[3 : 3 + ctx.count]) if needed)
        if not given or not wanted:
            return (None,) * (ctx.total + 3)
        leaves, values = ctx.saved_tensors, [value for value in cotangents if value is not None]
        found = _apply(pullback.pullback(wanted, given, plain_among(leaves, wanted)), [*leaves, *values], ctx.draws)
        return None, None, None, *gradients_of(leaves, wanted, found), *[None] * (ctx.total - ctx.count)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        pullback = ctx.node.function.pullback(*ctx.pull)
        moved = tangents[3 : 3 + ctx.count]
        given = tuple(n for n, tangent in enumerate(moved) if tangent is not None)
        values = [*ctx.saved_tensors, *(moved[number] for number in given)]
        every = tuple(range(len(ctx.pull[0])))
        return tuple(_apply(pullback.pushforward(given, every), values, ctx.draws))

    @staticmethod
    def vmap(info: Any, in_dims: Any, node: SavesResiduals, draws: Draws, pull: Pull, *tensors: torch.Tensor) -> Any:
        pullback, count = node.function.pullback(*pull), node.joint.primals + len(pull[1])
        results = _over_batch(pullback, draws, info.batch_size, "same", in_dims[3 : 3 + count], tensors[:count])
        return results, (0,) * len(results)


def _over_batch(
    function: AnyFunction, draws: Draws, size: int, randomness: str, in_dims: Sequence[int | None], leaves: Any
) -> Any:
    """Call a function on a batch of a size; each leaf has it in the given dim."""
    dims = tuple(None if dim is None else dim % leaf.ndim for dim, leaf in zip(in_dims, leaves, strict=True))
    axes = tuple(
        leaf._spec.dims[dim] if dim is not None and isinstance(leaf, DTensor) else ()
        for dim, leaf in zip(dims, leaves, strict=True)
    )
    batched = function.batched(dims, size, randomness, axes)
    return tuple(_FlatCall.apply(batched, draws, *leaves))  # type: ignore[no-untyped-call]
