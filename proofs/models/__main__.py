"""Stock models with random weights, forward and training, under three strategies, beside one device.

    python -m proofs.models                    # every case
    python -m proofs.models llama t5           # of these models

The exit status is 1 if a case differs, fails, or takes longer to plan than the limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from proofs.models.cases import MODELS, Model, prepare_torchvision
from proofs.models.measure import STRATEGIES, Case, measure
from proofs.models.report import line, markdown
from proofs.page import write_section


def cases(models: list[Model]) -> Iterator[Case]:
    """Every case of some models."""
    for model in models:
        for training in (False, True):
            for masked in (False, True) if model.masks() else (False,):
                yield from (Case(model, strategy, training, masked) for strategy in STRATEGIES)


def main() -> int:
    """Run and print; 1 if a case does not pass."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names of models; by default all")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this page")
    options = parser.parse_args()
    chosen = [model for model in MODELS if not options.names or model.name in options.names]
    prepare_torchvision()
    found = []
    for case in cases(chosen):
        found.append(measure(case))
        print(line(found[-1]), flush=True)
    if options.markdown:
        about = f"Written by\n\n    make test-models\n\ntorch {torch.__version__}.\n\n"
        write_section(options.markdown, "models", about + markdown(found))
    return int(not all(item.passes for item in found))


if __name__ == "__main__":
    sys.exit(main())
