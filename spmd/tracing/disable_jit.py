"""`disable_jit`: whether functions are compiled or run as they are written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from spmd.errors import SpmdError
from spmd.tracing.running import AsWritten, is_tracing, running, running_in


@contextlib.contextmanager
def disable_jit() -> Iterator[None]:
    """Run functions under `jit` and `shard_map` as they are written, so that `print` and `pdb` see values.

    As `jax.disable_jit`. Inside the `with` block a jitted function is called on whole plain tensors: DTensors are
    assembled, `constrain` and `reshard` copy, and results are placed by `out_specs`, or replicated. A function under
    `shard_map` runs on every rank: on a virtual mesh each rank has a thread, and one runs at a time, in rank order, up
    to its next collective; on a distributed mesh each process runs its rank. Random numbers are the same on all ranks.
    Gradients inside the function are those of the compiled one.

    If ranks call different collectives, or one ends where others wait, that is a `DivergenceError`, not a hang. The
    first error on a rank stops the others.

    Where a transform in a jitted function acts on one under `shard_map`, all of the jitted function runs again from its
    start, on every rank. A transform from outside of a call is applied inside of it, and computes forward values again.
    A function cannot close over a tensor on which a transform from outside acts: pass it as an argument.

    Raises:
        SpmdError: the block is in a function that is being traced.

    >>> import torch
    >>> from spmd import P, jit, make_mesh
    >>> def f(x):
    ...     print("x is", x)
    ...     return x + 1
    >>> with disable_jit():
    ...     y = jit(f, P("data"), P("data"), mesh=make_mesh({"data": 2}, runtime="virtual"))(torch.arange(4))
    x is tensor([0, 1, 2, 3])
    >>> y.full_tensor()
    tensor([1, 2, 3, 4])
    """
    if is_tracing():
        raise SpmdError("spmd.disable_jit was entered in a function under jit or shard_map. Enter it around the call.")
    outer = running()
    with running_in(outer if isinstance(outer, AsWritten) else AsWritten()):
        yield
