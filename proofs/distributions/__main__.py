"""`python -m proofs.distributions [NAME ...]`: every distribution of torch under `jit`, beside one device."""

from __future__ import annotations

import argparse
import warnings

import torch

from proofs.distributions.cases import cases, pairs
from proofs.distributions.check import divergence, questions


def main() -> int:
    """Print what differs; the exit status is 1 if anything does."""
    parser = argparse.ArgumentParser(prog="python -m proofs.distributions", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of distributions; by default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = [(case.name, question) for case in cases() for question in questions(case)]
    found += [(p.name, divergence(p, q)) for p, q in pairs()]
    compared, wrong = 0, 0
    for name, question in found:
        if options.names and not any(part in name for part in options.names):
            continue
        for size in (2, 3):
            compared += 1
            text = question.difference(size)
            if text is not None:
                wrong += 1
                print(f"{name}, {question.name}, {size} ranks: {text}", flush=True)
    print(f"{compared} compared, {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
