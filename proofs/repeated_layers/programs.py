"""Random programs with repeated layers on meshes: inference, gradients and training steps, with specs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from proofs.fuzz.draw import Draw
from proofs.fuzz.program import AXES, mesh_of
from proofs.repeated_layers.layers import Shared, Weights
from proofs.repeated_layers.models import VOCABULARY, Call, Model, Weight, model
from spmd import FREE, Machine, P
from spmd.api.jit import Jitted, jit
from spmd.core.mesh import Mesh
from spmd.plan.machine.link import Link

SMALL_MESHES = ((2,), (4,), (3,))
MESHES = (*SMALL_MESHES, (2, 2), (2, 4))
DEEP_MESHES = ((2, 2, 2),)
"""Of one program in twenty."""

_SLOW_LINKS = (("all_gather", 2.1e-5), ("all_reduce", 3.4e-5), ("all_to_all", 1e-5), ("reduce_scatter", 5.2e-5))

MACHINES = {
    "default": Machine(),
    "without latency": Machine(flops=1e9, memory_bandwidth=1e8, latency=0.0),
    "slow links": Machine(flops=1e9, memory_bandwidth=1e9, link_bandwidth=1e8, latency=1e-7, fuses=False),
    "measured links": Machine(
        flops=1e8,
        memory_bandwidth=1e8,
        link_bandwidth=1e9,
        latency=1e-5,
        operator_latency=1e-6,
        overlap=0.3,
        links=tuple(Link(axis, kind, latency, 1e9, latency) for axis in AXES for kind, latency in _SLOW_LINKS),
        fuses=False,
    ),
}
"""Machines on which small tensors are best replicated, best sharded, or some of them."""


@attrs.frozen(eq=False)
class Repeated:
    """A program with repeated layers.

    Args:
        seed: the seed that it was drawn from.
        name: what it is made of.
        function: of weights, optimizer state, input, target and what all layers share; the last argument of its call
            is how each layer is called.
        args: its arguments on one device.
        jitted: the function on the mesh.
        mesh: the mesh.
        memory: the memory limit of a small program, in peaks of the plan without a limit; None for no limit.
    """

    seed: int
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    jitted: Jitted[..., Any]
    mesh: Mesh
    memory: float | None

    def expected(self) -> Any:
        """The results on one device, where `torch.func` does not take layers that are checkpointed."""
        return self.function(*self.args, call=_plainly)


def _plainly(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


def _checkpointed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return checkpoint(function, *args, use_reentrant=False)  # type: ignore[no-any-return]


def program(seed: int, small: bool = False) -> Repeated:
    """The program of a seed, or its small one on a mesh of one axis; the default dtype must be float64."""
    rng = random.Random(seed)
    sizes = rng.choice(SMALL_MESHES if small else DEEP_MESHES if rng.random() < 0.05 else MESHES)
    mesh = mesh_of(sizes)
    draw = Draw(rng, axes=mesh.names, mesh=sizes)
    drawn = model(draw, small)
    kind = draw.choice("forward", "forward", "gradients", "sgd", "momentum", "adam")
    again, batched = kind != "forward" and draw.maybe(0.15), draw.maybe(0.12)
    returned, clipped = draw.maybe(0.2), kind in STATES and draw.maybe(0.3)
    function = _function(drawn, kind, again, batched, returned, clipped)
    args = _arguments(seed, drawn, STATES.get(kind, 0))
    style = draw.choice(*STYLES)
    weights = STYLES[style](draw, drawn.weights)
    batch = draw.choice(P("data"), P("data"), P("data"), P(), draw.spec(2))
    target = P(*batch.dims[: args[3].ndim])
    state = [weights if draw.maybe(0.8) else STYLES["dims"](draw, drawn.weights)] * STATES.get(kind, 0)
    out_specs = _out_specs(draw, kind, weights, state, returned)
    machine = draw.choice(*MACHINES)
    donated = (0, 1) if kind in STATES and draw.maybe(0.4) else ()
    memory = draw.choice(0.7, 0.9) if draw.maybe(0.2) else None
    jitted = jit(
        function,
        (weights, state, batch, target, P()),
        out_specs,
        mesh=mesh,
        machine=MACHINES[machine],
        donate_argnums=donated,
    )
    traits = {"checkpointed": again, "under vmap": batched, "layers returned": returned, "clipped": clipped}
    traits["donated"] = bool(donated)
    words = [kind, *(trait for trait, holds in traits.items() if holds), f"{style} weights", f"batch {batch!r}"]
    name = f"{drawn.name}; {', '.join(words)}; {mesh}, {machine}"
    return Repeated(seed, name, function, args, jitted, mesh, memory)


STATES = {"sgd": 0, "momentum": 1, "adam": 2}
"""How many tensors an optimizer has for each weight."""


def _function(drawn: Model, kind: str, again: bool, batched: bool, returned: bool, clipped: bool) -> Callable[..., Any]:
    """The function of a program; with `again` its layers are checkpointed."""

    def forward(p: Weights, x: Tensor, s: Shared, call: Call) -> tuple[Tensor, list[Tensor]]:
        if not batched:
            return drawn.forward(p, x, s, call)
        return torch.func.vmap(lambda each: drawn.forward(p, each, s, call))(x)

    def loss(p: Weights, x: Tensor, target: Tensor, s: Shared, call: Call) -> tuple[Tensor, list[Tensor]]:
        y, found = forward(p, x, s, call)
        means = [each.mean(-1) for each in found] if returned else []
        if drawn.classified:
            return F.cross_entropy(y.flatten(0, -2), target.flatten()), means
        return (y - target).square().mean(), means

    def function(
        p: Weights, states: list[Weights], x: Tensor, target: Tensor, s: Shared, call: Call | None = None
    ) -> Any:
        call = call or (_checkpointed if again else _plainly)
        if kind == "forward":
            y, found = forward(p, x, s, call)
            return (y, found) if returned else y
        grads, (value, means) = torch.func.grad_and_value(lambda p: loss(p, x, target, s, call), has_aux=True)(p)
        if clipped:
            norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
            grads = {name: grad * (1.0 / (norm + 1e-6)).clamp(max=1.0) for name, grad in grads.items()}
        if kind == "gradients":
            return value, means, grads
        return value, means, *_step(kind, p, states, grads)

    return function


def _step(
    kind: str, p: Weights, states: list[Weights], grads: Weights
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The weights and the states of an optimizer after a step."""
    if kind == "sgd":
        return {name: p[name] - 0.1 * grads[name] for name in p}, []
    first = {name: 0.9 * states[0][name] + 0.1 * grads[name] for name in p}
    if kind == "momentum":
        return {name: p[name] - 0.1 * first[name] for name in p}, [first]
    second = {name: 0.99 * states[1][name] + 0.01 * grads[name].square() for name in p}
    return {name: p[name] - 0.1 * first[name] / (second[name].sqrt() + 1e-3) for name in p}, [first, second]


def _arguments(seed: int, drawn: Model, states: int) -> tuple[Any, ...]:
    generator, sizes = torch.Generator().manual_seed(seed), drawn.sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights = {name: 0.4 * normal(*weight.shape) for name, weight in drawn.weights.items()}
    held = [
        {name: 0.1 + normal(*weight.shape).square() for name, weight in drawn.weights.items()} for _ in range(states)
    ]
    tokens, values = (sizes.batch, sizes.tokens), (sizes.batch, sizes.tokens, sizes.width)
    integers = [torch.randint(VOCABULARY, tokens, generator=generator) for _ in range(2)]
    x = integers[0] if drawn.embedded else normal(*values)
    target = integers[1] if drawn.classified else normal(*values)
    mask = torch.full((sizes.tokens, sizes.tokens), -1e9).triu(1)
    angle = normal(sizes.tokens, sizes.width // sizes.heads // 2)
    return weights, held, x, target, {"mask": mask, "angle": angle}


def _replicated(draw: Draw, weights: Mapping[str, Weight]) -> dict[str, P]:
    return dict.fromkeys(weights, P())


def _fully_sharded(draw: Draw, weights: Mapping[str, Weight]) -> dict[str, P]:
    """The first dim, along the first mesh axis or all."""
    axes = draw.axes if draw.maybe(0.3) else draw.axes[:1]
    return dict.fromkeys(weights, P(axes))


def _tensor_parallel(draw: Draw, weights: Mapping[str, Weight]) -> dict[str, P]:
    """Along the last mesh axis; of several, some weights are sharded along the first, too."""
    axis, other = draw.axes[-1], draw.axes[0] if len(draw.axes) > 1 and draw.maybe() else None

    def spec(weight: Weight) -> P:
        dims: list[Any] = [None] * len(weight.shape)
        if weight.parallel is not None:
            dims[weight.parallel] = axis
        free = [dim for dim, taken in enumerate(dims) if taken is None]
        if other is not None and free:
            dims[free[0]] = other
        return P(*dims)

    return {name: spec(weight) for name, weight in weights.items()}


def _by_name(draw: Draw, weights: Mapping[str, Weight]) -> dict[str, P]:
    """A random spec for each weight of a layer, the same in all equal layers."""
    known: dict[tuple[str, int], P] = {}
    for weight in weights.values():
        key = weight.name, len(weight.shape)
        known.setdefault(key, draw.spec(len(weight.shape)))
    return {name: known[weight.name, len(weight.shape)] for name, weight in weights.items()}


def _anyhow(draw: Draw, weights: Mapping[str, Weight]) -> dict[str, P]:
    """A random spec for some weights, which differ between layers."""
    return {name: draw.spec(len(weight.shape)) if draw.maybe(0.2) else P() for name, weight in weights.items()}


STYLES: dict[str, Callable[[Draw, Mapping[str, Weight]], dict[str, P]]] = {
    "replicated": _replicated,
    "dims": _fully_sharded,
    "tensor parallel": _tensor_parallel,
    "by name": _by_name,
    "different": _anyhow,
}
"""How weights are sharded."""


def _out_specs(draw: Draw, kind: str, weights: Any, state: Any, returned: bool) -> Any:
    """Specs of the results: of weights and states those of the arguments, or the planner's choice."""
    if draw.maybe(0.15):
        return FREE
    if kind == "forward":
        first = draw.choice(P(), P("data"), draw.spec(3))
        return (first, draw.choice(P(), P("data"))) if returned else first
    if kind == "gradients":
        return P(), P(), weights
    return P(), P(), weights, state
