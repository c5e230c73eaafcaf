"""Runs a function on every rank of a mesh, uncompiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from spmd.api.uncompiled.baton import Baton
from spmd.api.uncompiled.counter_mode import RankDraws
from spmd.api.uncompiled.operators import BackwardPasses, RankOperators
from spmd.api.uncompiled.rank import ProcessRank, Rank, ThreadRank, answer, call_name
from spmd.api.uncompiled.values import RankTrace
from spmd.collectives.distributed.agreement import failing_together
from spmd.core.mesh import Mesh, Runtime, use_mesh
from spmd.core.pytree import tree_leaves
from spmd.runtime.torch_settings import (
    default_generator_state,
    generator_state,
    set_default_generator_state,
    set_generator_state,
)
from spmd.tracing.running import running_in
from spmd.tracing.source import user_source

T = TypeVar("T")


def run_on_ranks(mesh: Mesh, function: Callable[[], T]) -> T:
    """Run a function on every rank that this process holds.

    Tensors outside of shard_map bodies are global, and every rank has all of each.

    Args:
        mesh: a virtual or a distributed mesh.
        function: computes global values.

    Returns:
        What the first of these ranks returns.

    Raises:
        DivergenceError: ranks call different collectives, or one ends where others wait.
        SpmdError: another process failed.
    """
    if mesh.runtime is Runtime.DISTRIBUTED:
        (coordinate,) = mesh.held_coordinates
        rank = ProcessRank(mesh, coordinate, user_source())
        with failing_together(call_name(mesh), mesh):
            result = _run(rank, RankDraws(), function)
        rank.end()
        return result
    inherit, caller, draws = _settings(), user_source(), RankDraws()
    holder: list[Baton[T]] = []

    def on(rank: Rank) -> Callable[[], T]:
        def call() -> T:
            with inherit():
                return _run(rank, draws, function)

        return call

    ranks = [ThreadRank(mesh, coordinate, caller, lambda: holder[0]) for coordinate in mesh.coordinates()]
    states = _Generators(mesh.device, mesh.size)
    holder.append(Baton([on(rank) for rank in ranks], lambda calls: answer(mesh, calls), states.running))
    with _one_dual_level():
        results = holder[0].run()
    states.finish()
    return results[0]


def _run(rank: Rank, draws: RankDraws, function: Callable[[], T]) -> T:
    trace = RankTrace(rank)
    with use_mesh(rank.mesh), running_in(trace), RankOperators(trace), BackwardPasses(trace), draws.on_rank():
        result = function()
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and trace.observer is not None:
                trace.observer.check_result(trace.value(leaf))
        return result


@contextlib.contextmanager
def _one_dual_level() -> Iterator[None]:
    """A context in which threads may run `torch.func.jvp` side by side.

    Torch has one level of forward derivatives, not one for each thread, and the outermost jvp opens and closes it. Here
    it stays open, and each jvp counts as an inner one.
    """
    if forward_ad._current_level >= 0:
        yield
        return
    with forward_ad.dual_level():
        eager_transforms.JVP_NESTING += 1
        try:
            yield
        finally:
            eager_transforms.JVP_NESTING -= 1


class _Generators:
    """The random numbers of ranks in one process: each has its own generator state, all starting from one.

    Args:
        device: the device of the generator.
        ranks: the number of ranks.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._states = device, [generator_state(device)] * ranks

    @contextlib.contextmanager
    def running(self, rank: int) -> Iterator[None]:
        """A context in which a rank runs: its thread draws from the default generator."""
        before = default_generator_state(self._device)
        set_default_generator_state(self._states[rank], self._device)
        try:
            yield
        finally:
            self._states[rank] = default_generator_state(self._device)
            set_default_generator_state(before, self._device)

    def finish(self) -> None:
        """Go on with the state of the first rank, which is that of all if they draw alike."""
        set_generator_state(self._states[0], self._device)


def _settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context for other threads with the settings of torch that hold for this thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    modes = _get_current_function_mode_stack()
    casts = [(device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device)]

    @contextlib.contextmanager
    def inherit() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                _push_mode(mode)
                stack.callback(_pop_mode)
            for device, dtype in casts:
                stack.enter_context(torch.autocast(device, dtype))
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            # Backward passes run in the rank's own thread: one thread of a device cannot wait for itself.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    return inherit


_DEVICES = ("cpu", "cuda")
