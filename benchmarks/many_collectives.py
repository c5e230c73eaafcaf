"""Steps a second of a function with a hundred small collectives, each of which needs the one before, on gloo processes.

What a collective costs its rank beside torch's own is most of such a step.

    python benchmarks/many_collectives.py --ranks 2
    PYTHONPATH=OTHER_CHECKOUT python benchmarks/many_collectives.py     # of another version of the package
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import spmd
from spmd import P

COLLECTIVES, STEPS, ROUNDS = 100, 50, 7


def rotate(x: torch.Tensor) -> torch.Tensor:
    """A hundred sums over all ranks, one after the other."""
    for _ in range(COLLECTIVES):
        x = spmd.collectives.psum(x, "x") * 0.5
    return x


def measure() -> float:
    """Steps a second of rank 0, the median of some rounds."""
    torch.set_num_threads(1)
    mesh = spmd.make_mesh({"x": spmd.process_count()})
    step = spmd.jit(spmd.shard_map(rotate, mesh, P("x"), P("x")), P("x"), P("x"), mesh=mesh, machine=spmd.Machine())
    x = step(torch.ones(8 * mesh.size))
    rates = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS):
            x = step(x)
        rates.append(STEPS / (time.perf_counter() - start))
    return statistics.median(rates)


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    rate = spmd.launch(measure, ranks)
    print(f"{rate:.1f} steps a second of {COLLECTIVES} collectives on {ranks} ranks, with {spmd.__file__}")


if __name__ == "__main__":
    main()
