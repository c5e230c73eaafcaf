"""How primitives are defined: operators in namespace `spmd` that can be traced, differentiated and batched.

A runtime runs them: calling one directly, outside of a trace, is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function

from spmd.collectives.axis_types import AxisType
from spmd.collectives.transport.exchange import Exchange
from spmd.collectives.transport.group import Group
from spmd.collectives.transport.ragged_exchange import RaggedExchange
from spmd.core.placement import Reduction
from spmd.errors import SpmdError

Shape: TypeAlias = tuple[int, ...]

Local: TypeAlias = Callable[..., Tensor]
"""What one rank does for a call without communication: a function of its operand, if it has one."""

Arguments: TypeAlias = tuple[Any, ...]
"""The arguments of a call, with the tensor and the axes."""

_LIBRARY = torch.library.Library("spmd", "FRAGMENT")


@attrs.frozen(eq=False)
class Primitive:
    """A primitive on one tensor `x`: its schema and the rules of transforms, where `*args` are the other arguments.

    Tensors among the other arguments are integers, so they have no gradients.

    Args:
        schema: name and arguments, as torch.library defines operators; the first argument is `Tensor x`.
        shape: `shape(x.shape, *args)`: the shape of the result.
        transpose: `transpose(g, x.shape, *args)`: the cotangent of x for a cotangent `g` of the result.
        batched: `batched(n, *args)`: the other arguments for an x with a new leading dim of length n, under vmap.
        vmap: `vmap(info, in_dims, x, *args)`: the rule for vmap as torch.library takes it, where `batched` does not do.
        is_linear: `is_linear(*args)`: whether the call is a linear function of x.
        jvp, vjp: `(t, x, result, *args)`: the tangent of the result for a tangent `t` of x, and the cotangent of x for
            a cotangent of the result; used where the call is not linear.
        types: `types(*args)`: the type of the result for each possible type of x, along the axes of the call.
        untyped: the primitive that ranks run, where this one differs from it in types only.
        arguments: `arguments(step, shape)`: the other arguments but the axes, of a step of a redistribution on the rank
            whose result has this shape; None if there are no such steps.
        local: `local(group, index, device, x, *args)`: what the rank with this index runs for an x like the meta, where
            it does not communicate; `args` are without the axes.
    """

    schema: str
    shape: Callable[..., Shape]
    transpose: Callable[..., Tensor]
    types: Callable[..., Mapping[AxisType, AxisType]]
    batched: Callable[..., tuple[Any, ...]] = lambda n, *args: args
    is_linear: Callable[..., bool] = lambda *args: True
    jvp: Callable[..., Tensor] | None = None
    vjp: Callable[..., Tensor] | None = None
    vmap: Callable[..., tuple[Tensor, int]] | None = None
    untyped: Primitive | None = None
    arguments: Callable[..., tuple[Any, ...]] | None = None
    local: Callable[..., Local] | None = None

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @property
    def op(self) -> torch._ops.OpOverload:
        """The operator, `torch.ops.spmd.<name>.default`."""
        return getattr(torch.ops.spmd, self.name).default


def _no_example(ranks: int, count: int) -> tuple[Shape, tuple[Any, ...]]:
    raise AssertionError("its sizes are data")


@attrs.frozen(eq=False, kw_only=True)
class Collective(Primitive):
    """A primitive in which ranks communicate: what it sends, how it runs, and which calls go together.

    `args` are the other arguments without the axes, and `calls` the arguments of all ranks of a group, in group order.

    Args:
        most_sent: `most_sent(counts, x.shape, *args)`: the most elements that any rank sends by the ring algorithm,
            with so many ranks along each axis, for the shape and the arguments of the rank where x is largest.
        step_bytes: `step_bytes(step)`: the most bytes that any rank sends in a step of a redistribution; by default by
            `most_sent` of the rank at coordinate zero, which has the largest shard.
        sent: `sent(group, calls, results)`: the bytes that each rank sends, simulated round by round. `most_sent` is
            computed without it, so that one checks the other.
        ring: `ring(ranks, nbytes)`: the bytes that each rank sends of equal operands of `nbytes`.
        buffer: `buffer(ranks, sent)`: the inverse: the bytes of the operand or the result, of the larger one.
        copied: `copied(ranks, buffer)`: the bytes that are copied to and from the buffer of a launch of several.
        run: `run(group, calls)`: the results of all ranks.
        exchange: `exchange(member, x, *args)`: one rank's part on a process group, for an x like the meta.
        alone: `alone(member, *args)`: what a rank does in a group of its own.
        is_identity: `is_identity(*args)`: whether that is nothing if the result has the shape of x.
        alike: `alike(*args)`: the arguments that all ranks must pass alike, whatever their shapes.
        fits: `fits(x.shape, *args)`: what must be equal on the ranks that call it together.
        reduction: `reduction(*args)`: the reduction; None if it does not reduce.
        joins: whether calls of one dtype and reduction are launched as one.
        gathers: whether a sharded x becomes whole.
        is_invariant: whether all ranks get the same result.
        sizes_are_data: whether the numbers of elements that ranks send are known when it runs.
        copies_operand: whether torch copies x to the buffer that is received, if it is launched alone.
        measured_results: whether what is done with the buffer that is received is in the measured time of a launch.
        busiest: `busiest(indices, *args)`: `args` of a call in which the first rank sends and receives if any does.
        in_parts: `in_parts(device, ranks)`: whether it is sent as an all_to_all, on devices of a type.
        example: `example(ranks, count)`: the shape of an x of `count` elements or less, and `args` on the first rank.
        counts_as: the collective as which plans count it, if that is another.
    """

    most_sent: Callable[..., int]
    sent: Callable[[Group, Sequence[Arguments], Sequence[Tensor]], list[int]]
    run: Callable[[Group, Sequence[Arguments]], list[Tensor]]
    exchange: Callable[..., Exchange | RaggedExchange]
    alike: Callable[..., Hashable]
    step_bytes: Callable[..., float] | None = None
    ring: Callable[[int, float], float] = lambda ranks, nbytes: (ranks - 1) * nbytes / ranks
    buffer: Callable[[int, float], float] = lambda ranks, sent: sent * ranks / max(ranks - 1, 1)
    copied: Callable[[int, float], float] = lambda ranks, buffer: buffer
    alone: Callable[..., Local] = lambda member, *args: Tensor.contiguous
    is_identity: Callable[..., bool] = lambda *args: True
    fits: Callable[..., Hashable] = lambda shape, *args: shape
    reduction: Callable[..., Reduction | None] = lambda *args: None
    joins: bool = True
    gathers: bool = False
    is_invariant: bool = False
    sizes_are_data: bool = False
    copies_operand: bool = False
    measured_results: bool = False
    busiest: Callable[..., tuple[Any, ...]] = lambda indices, *args: args
    in_parts: Callable[[str, int], bool] = lambda device, ranks: False
    example: Callable[[int, int], tuple[Shape, tuple[Any, ...]]] = _no_example
    counts_as: Collective | None = None

    @property
    def kind(self) -> str:
        """The name of the collective as which plans count it."""
        return (self.counts_as or self).name

    def most_bytes_sent(self, counts: tuple[int, ...], shape: Shape, itemsize: int, args: Sequence[Any] = ()) -> float:
        """The largest number of bytes that any rank of a group sends in a call, by the ring algorithm.

        Shards are the chunks of `torch.chunk`, uneven or empty; an all_reduce splits its flat elements in the same way.
        For equal chunks the result is that of `ring_bytes`. The sizes of a ragged_all_to_all are data: it counts as if
        a rank sent every row of its operand once, an upper bound where no rank sends a row to several others.

        Args:
            counts: the number of ranks along each of the mesh axes, major first.
            shape: the local shape of the operand, on the rank where it is largest.
            itemsize: bytes per element.
            args: the arguments after the tensor but the axes, on that rank.

        >>> from spmd.collectives.primitives import ALL_GATHER, ALL_REDUCE
        >>> ALL_REDUCE.most_bytes_sent((4,), (1,), 4)  # three of four blocks are empty
        8.0
        >>> ALL_GATHER.most_bytes_sent((4,), (2,), 4, (0, 5))  # the blocks are 2, 2, 1 and 0
        20.0
        """
        return 0.0 if math.prod(counts) == 1 else float(self.most_sent(counts, shape, *args) * itemsize)

    def ring_bytes(self, ranks: int, nbytes: float) -> float:
        """Bytes that each of so many ranks sends by the ring algorithm, with an operand of `nbytes` on each.

        Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005).

        >>> from spmd.collectives.primitives import ALL_GATHER, ALL_REDUCE
        >>> ALL_REDUCE.ring_bytes(4, 1000), ALL_GATHER.ring_bytes(4, 250)
        (1500.0, 750.0)
        """
        return 0.0 if ranks == 1 else float(self.ring(ranks, nbytes))


def _derive(primitive: Primitive) -> Callable[..., Tensor]:
    """The autograd kernel: one level of differentiation, in forward and reverse mode, around the operator itself.

    torch.library.register_autograd has reverse mode only. A single-level Function is what the dispatcher expects below
    torch.func's interpreters, which call this kernel once per level.
    """

    class Derivative(torch.autograd.function._SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, modes: tuple[bool, bool], keyset: Any, x: Tensor, *args: Any) -> Tensor:
            # A Function's forward runs without gradients; outer levels must record the call, so modes are restored.
            grad, forward_grad = modes
            with (
                torch._C._AutoDispatchBelowAutograd(),
                torch.set_grad_enabled(grad),
                torch.autograd.forward_ad._set_fwd_grad_enabled(forward_grad),
            ):
                result = primitive.op.redispatch(keyset & torch._C._after_autograd_keyset, x, *args)
            ctx.shape, ctx.is_linear, ctx.forward_grad = tuple(x.shape), primitive.is_linear(*args), forward_grad
            ctx.args = [None if isinstance(arg, Tensor) else arg for arg in args]
            saved = [] if ctx.is_linear else [x, result]
            saved += [arg for arg in args if isinstance(arg, Tensor)]
            ctx.save_for_backward(*saved)
            ctx.save_for_forward(*saved)
            ctx.positions = [position for position, arg in enumerate(args) if isinstance(arg, Tensor)]
            if not result.is_floating_point() and not result.is_complex():
                ctx.mark_non_differentiable(result)
            return result

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            values, args = _saved(ctx)
            if ctx.is_linear:
                cotangent = primitive.transpose(g, ctx.shape, *args)
            else:
                cotangent = _nonlinear(primitive.vjp, primitive)(g, *values, *args)
            return (None, None, cotangent, *(None for _ in args))

        @staticmethod
        def jvp(ctx: Any, _: None, __: None, t: Tensor, *___: None) -> Tensor:
            values, args = _saved(ctx)
            # As in `forward`: a Function's jvp runs without tangents, and an outer level has some of `t`.
            with torch.autograd.forward_ad._set_fwd_grad_enabled(ctx.forward_grad):
                if ctx.is_linear:
                    return primitive.op(t, *args)
                return _nonlinear(primitive.jvp, primitive)(t, *values, *args)

    def kernel(keyset: Any, x: Tensor, *args: Any) -> Tensor:
        with enable_single_level_autograd_function():
            modes = (torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled())
            return Derivative.apply(modes, keyset, x, *args)  # type: ignore[attr-defined]

    return kernel


def _saved(ctx: Any) -> tuple[Sequence[Tensor], list[Any]]:
    """What a call saved: x and the result if it is not linear, and its other arguments."""
    args, count = list(ctx.args), len(ctx.saved_tensors) - len(ctx.positions)
    for position, tensor in zip(ctx.positions, ctx.saved_tensors[count:], strict=True):
        args[position] = tensor
    return ctx.saved_tensors[:count], args


def _nonlinear(rule: Callable[..., Tensor] | None, primitive: Primitive) -> Callable[..., Tensor]:
    if rule is None:
        raise SpmdError(f"spmd::{primitive.name} can be differentiated for op='sum' only. Reduce first, then shard.")
    return rule


def register(
    schema: str,
    fake: Callable[..., Tensor],
    *,
    kernel: Callable[..., Tensor] | None = None,
    autograd: Callable[..., Tensor] | None = None,
    batch: Callable[..., tuple[Any, Any]] | None = None,
) -> str:
    """Define an operator that can be traced.

    Args:
        schema: name and arguments, as torch.library defines operators.
        fake: the result on fake tensors.
        kernel: what a call outside of a runtime does; by default it raises.
        autograd: the autograd kernel, which takes the set of dispatch keys first.
        batch: the rule for vmap, as `torch.library.register_vmap` takes it.

    Returns:
        The qualified name, `spmd::<name>`.
    """
    name = f"spmd::{schema.partition('(')[0]}"

    def call(*args: Any) -> Tensor:
        raise SpmdError(f"{name} was called outside of a runtime. Use collectives inside spmd.shard_map or spmd.jit.")

    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel or call, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=_LIBRARY)
    if autograd is not None:
        _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    if batch is not None:
        torch.library.register_vmap(name, batch, lib=_LIBRARY)
    return name


def register_primitive(primitive: Primitive) -> None:
    """Define the operator of a primitive, with its fake, autograd and vmap rules."""

    def fake(x: Tensor, *args: Any) -> Tensor:
        return x.new_empty(primitive.shape(tuple(x.shape), *args))

    def batch(info: Any, in_dims: Any, x: Tensor, *args: Any) -> tuple[Tensor, int]:
        return primitive.op(x.movedim(in_dims[0], 0), *primitive.batched(info.batch_size, *args)), 0

    register(primitive.schema, fake, autograd=_derive(primitive), batch=primitive.vmap or batch)
