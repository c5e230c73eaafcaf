"""Transforms from outside of a function that runs uncompiled: each runs as a function of whole tensors, too.

The derivative of a function is a function that computes the derivative inside, and the batch of a function is one of a
batch: where it calls functions under `shard_map`, each rank transforms them for itself. Forward values are computed
again for each transform.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from spmd.api.transforms.flat_function import positions, replaced
from spmd.api.transforms.transformed import gradients_of, is_transformed, plain_among
from spmd.api.uncompiled.inside import on_whole
from spmd.api.values.distribute import place
from spmd.api.values.dtensor import DTensor
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.job.torch_compile import never_compiled
from spmd.runtime.torch_settings import drawing_from, generator_state

Flat = Callable[..., Sequence[torch.Tensor]]
Specs = Callable[[Sequence[torch.Tensor]], Sequence[DTensorSpec]]


@attrs.define(eq=False)
class WholeFunction:
    """A function from whole tensors to whole tensors, and how its results are placed.

    Args:
        function: the function.
        mesh: the mesh.
        in_specs: the spec of each argument, which its gradient has, too.
        out_specs: from the results to their specs.
        state: the state of the random generator at the call.
        replays: whether it draws from this state, as the function did of which it is a derivative.
        plain: the numbers of the results that are plain tensors: gradients of plain arguments.

    Attributes:
        placed: the specs of the results of the last run.
    """

    function: Flat
    mesh: Mesh
    in_specs: Sequence[P]
    out_specs: Specs
    state: torch.Tensor
    replays: bool = False
    plain: Sequence[int] = ()
    placed: Sequence[DTensorSpec] = attrs.field(default=(), init=False)

    def __call__(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The placed results for plain tensors and DTensors, on which transforms may act."""
        if is_transformed(leaves):
            return _WholeCall.apply(self, *leaves)  # type: ignore[no-any-return, no-untyped-call]
        return self.run(leaves)

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the function; no transform acts on the leaves."""
        device = self.mesh.device
        draws = drawing_from(self.state, device) if self.replays else contextlib.nullcontext()
        with temporarily_clear_interpreter_stack(), torch.enable_grad(), draws:
            whole = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf.detach().to(device) for leaf in leaves]
            results = on_whole(self.mesh, lambda: self.function(*[leaf.detach().clone() for leaf in whole]))
            self.placed = self.out_specs(results)
            placed = enumerate(zip(results, self.placed, strict=True))
            return [leaf.clone() if n in self.plain else place(leaf, spec) for n, (leaf, spec) in placed]

    def pullback(self, wanted: tuple[int, ...], given: tuple[int, ...], plain: Sequence[int]) -> WholeFunction:
        """From arguments and cotangents of the results `given` to the gradients of the arguments `wanted`.

        Those of the arguments `plain` are plain tensors.
        """

        def function(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            primals, cotangents = tensors[: len(self.in_specs)], tensors[len(self.in_specs) :]
            pull = torch.func.vjp(self._of(primals, wanted, given), *(primals[n] for n in wanted))[1]
            return pull(tuple(cotangents))  # type: ignore[no-any-return]

        in_specs = (*self.in_specs, *map(self._placed, given))
        return self._derived(function, in_specs, [self.in_specs[n] for n in wanted], positions(wanted, plain))

    def pushforward(self, given: tuple[int, ...], wanted: tuple[int, ...]) -> WholeFunction:
        """From arguments and tangents of the arguments `given` to the tangents of the results `wanted`."""

        def function(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            primals, tangents = tensors[: len(self.in_specs)], tensors[len(self.in_specs) :]
            moved = tuple(primals[n] for n in given)
            return torch.func.jvp(self._of(primals, given, wanted), moved, tuple(tangents))[1]  # type: ignore[no-any-return]

        in_specs = (*self.in_specs, *(self.in_specs[n] for n in given))
        return self._derived(function, in_specs, [self._placed(n) for n in wanted], positions(wanted, self.plain))

    def _placed(self, number: int) -> P:
        """The spec of a result, with nothing pending; replicated if only a batch of the function has run."""
        return self.placed[number].complete.pspec if self.placed else P()

    def _of(self, primals: Sequence[torch.Tensor], moved: tuple[int, ...], kept: tuple[int, ...]) -> Flat:
        """The results `kept` as a function of the arguments `moved`."""

        def some(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = self.function(*replaced(primals, moved, tensors))
            return tuple(results[n] for n in kept)

        return some

    def batched(self, in_dims: tuple[int | None, ...], randomness: str) -> WholeFunction:
        """The function of a batch; it is in dim 0 of every result, which is replicated."""
        function = torch.func.vmap(lambda *leaves: tuple(self.function(*leaves)), in_dims, 0, randomness)
        replicated = lambda results: [DTensorSpec.make(self.mesh, P(), TensorMeta.of(x)) for x in results]  # noqa: E731
        in_specs = [P() if dim is not None else spec for dim, spec in zip(in_dims, self.in_specs, strict=True)]
        return WholeFunction(function, self.mesh, in_specs, replicated, self.state, self.replays, self.plain)

    def _derived(
        self, function: Flat, in_specs: Sequence[P], given: Sequence[P], plain: Sequence[int]
    ) -> WholeFunction:
        def specs(results: Sequence[torch.Tensor]) -> list[DTensorSpec]:
            return [DTensorSpec.make(self.mesh, spec, TensorMeta.of(x)) for spec, x in zip(given, results, strict=True)]

        return WholeFunction(function, self.mesh, in_specs, specs, self.state, True, plain)


def whole_function(function: Flat, mesh: Mesh, in_specs: Sequence[DTensorSpec], out_specs: Specs) -> WholeFunction:
    """A function that is called now."""
    return WholeFunction(
        function, mesh, [spec.complete.pspec for spec in in_specs], out_specs, generator_state(mesh.device)
    )


class _WholeCall(torch.autograd.Function):
    """A call of a function of whole tensors."""

    @staticmethod
    def forward(node: WholeFunction, *leaves: torch.Tensor) -> Any:
        return tuple(node.run(leaves))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.node, *leaves = inputs
        ctx.count, ctx.results = len(leaves), len(output)
        ctx.continuous = tuple(n for n, value in enumerate(output) if _is_continuous(value))
        ctx.mark_non_differentiable(*(value for value in output if not _is_continuous(value)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves)
        ctx.save_for_forward(*leaves)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        given = tuple(n for n, value in enumerate(cotangents) if value is not None)
        wanted = tuple(n for n, needed in enumerate(ctx.needs_input_grad[1:]) if needed)
        if not given or not wanted:
            return (None,) * (ctx.count + 1)
        leaves, values = ctx.saved_tensors, [value for value in cotangents if value is not None]
        pullback = ctx.node.pullback(wanted, given, plain_among(leaves, wanted))
        return None, *gradients_of(leaves, wanted, pullback([*leaves, *values]))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        given = tuple(n for n, tangent in enumerate(tangents) if tangent is not None)
        directions = [tangent for tangent in tangents if tangent is not None]
        moved = ctx.node.pushforward(given, ctx.continuous)([*ctx.saved_tensors, *directions])
        return tuple(replaced([None] * ctx.results, ctx.continuous, moved))

    @staticmethod
    def vmap(info: Any, in_dims: Any, node: WholeFunction, *leaves: torch.Tensor) -> Any:
        dims = tuple(None if dim is None else dim % x.ndim for dim, x in zip(in_dims[1:], leaves, strict=True))
        randomness = "same" if node.replays else info.randomness
        results = tuple(_WholeCall.apply(node.batched(dims, randomness), *leaves))  # type: ignore[no-untyped-call]
        return results, (0,) * len(results)


def _is_continuous(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
