"""Flat functions that run uncompiled, on whole tensors.

The derivative of a function is a function that computes the derivative inside, and the batch of a function is one of a
batch: where it calls functions under `shard_map`, each rank transforms them for itself. Forward values are computed
again for each transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from spmd.api.transforms.flat_function import Flat, FlatFunction
from spmd.api.uncompiled.inside import on_whole
from spmd.api.values.distribute import place
from spmd.api.values.dtensor import DTensor
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec, P, TensorMeta

OutSpecs = Callable[[Sequence[torch.Tensor]], Sequence[DTensorSpec]]
"""From the results of a function to their specs."""


class WholeFunction(FlatFunction[P, P]):
    """A function from whole tensors to whole tensors, and how its results are placed.

    Args:
        function: the function.
        mesh: the mesh.
        in_specs: the spec of each argument, which its gradient has, too.
        out_specs: from the results to their specs.
        plain: as in `FlatFunction`.

    Attributes:
        placed: the specs of the results of the last run; none if only a batch of the function has run.
    """

    is_random = True  # it may be: nothing is known of it

    def __init__(
        self, function: Flat, mesh: Mesh, in_specs: Sequence[P], out_specs: OutSpecs, plain: Sequence[int] = ()
    ) -> None:
        super().__init__(function, mesh, in_specs, plain)
        self.out_specs = out_specs
        self.placed: Sequence[DTensorSpec] = ()

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        device = self.mesh.device
        with temporarily_clear_interpreter_stack(), torch.enable_grad():
            whole = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf.detach().to(device) for leaf in leaves]
            results = on_whole(self.mesh, lambda: self.function(*[leaf.detach().clone() for leaf in whole]))
            self.placed = self.out_specs(results)
            placed = enumerate(zip(results, self.placed, strict=True))
            return [leaf.clone() if n in self.plain else place(leaf, spec) for n, (leaf, spec) in placed]

    def cotangent_specs(self, results: Sequence[int]) -> list[P]:
        return [self.placed[number].complete.pspec if self.placed else P() for number in results]

    tangent_specs = cotangent_specs

    def input_tangent_specs(self, arguments: Sequence[int]) -> list[P]:
        return [self.in_specs[number] for number in arguments]

    def gradient_specs(self, arguments: Sequence[int], plain: Sequence[int]) -> list[P]:
        return self.input_tangent_specs(arguments)

    def derived(
        self, function: Flat, in_specs: Sequence[P], out_specs: Sequence[P], name: str, plain: Sequence[int]
    ) -> WholeFunction:
        def specs(results: Sequence[torch.Tensor]) -> list[DTensorSpec]:
            pairs = zip(out_specs, results, strict=True)
            return [DTensorSpec.make(self.mesh, spec, TensorMeta.of(x)) for spec, x in pairs]

        return WholeFunction(function, self.mesh, in_specs, specs, plain)

    def _batched(
        self, in_dims: tuple[int | None, ...], size: int, randomness: str, axes: tuple[tuple[str, ...], ...]
    ) -> WholeFunction:
        """As in `FlatFunction`; the results, and the batched arguments, are replicated."""
        replicated = lambda results: [DTensorSpec.make(self.mesh, P(), TensorMeta.of(x)) for x in results]  # noqa: E731
        in_specs = [P() if dim is not None else spec for dim, spec in zip(in_dims, self.in_specs, strict=True)]
        return WholeFunction(self.over_batch(in_dims, randomness), self.mesh, in_specs, replicated, self.plain)
