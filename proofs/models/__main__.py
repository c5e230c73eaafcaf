"""Stock models with random weights, forward and training, under three strategies, beside one device.

    python -m proofs.models                    # every case
    python -m proofs.models llama speech       # of these models and families
    python -m proofs.models --routes           # three steps by each of three routes instead

The exit status is 1 if a case differs, fails, or takes longer to plan than the limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from proofs.models.cases import FAMILIES, MODELS, Model, prepare_torchvision
from proofs.models.measure import STRATEGIES, Case, measure
from proofs.models.report import line, line_of_trial, markdown, markdown_of_routes, summary
from proofs.models.routes import LAYOUTS, ROUTES, train
from proofs.page import section, write_section


def cases(models: list[Model]) -> Iterator[Case]:
    """Every case of some models."""
    for model in models:
        for training in (False, True) if model.trains else (False,):
            for masked in (False, True) if model.masks() else (False,):
                yield from (Case(model, strategy, training, masked) for strategy in STRATEGIES)


def train_by_routes(models: list[Model], page: Path | None) -> int:
    """Train models by each route, and print; 1 if one differs."""
    prepare_torchvision()
    trials = []
    for model in models:
        for layout in LAYOUTS if model.trains else ():
            trials += train(model, layout)
            print(*map(line_of_trial, trials[-len(ROUTES) :]), sep="\n", flush=True)
    if page:
        write_section(page, "routes", markdown_of_routes(trials))
    return int(not all(trial.passes for trial in trials))


def main() -> int:
    """Run and print; 1 if a case does not pass."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names of models and families; by default all")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a table of each family here")
    parser.add_argument("--routes", action="store_true", help="train by each route; with --markdown, all models")
    options = parser.parse_args()
    chosen = [model for model in MODELS if not options.names or {model.name, model.family} & {*options.names}]
    if options.routes:
        return train_by_routes([*MODELS] if options.markdown else chosen, options.markdown)
    if options.markdown:  # a family has one table
        chosen = [model for model in MODELS if model.family in {model.family for model in chosen}]
    prepare_torchvision()
    passed = True
    for family in dict.fromkeys(model.family for model in chosen):
        found = []
        for case in cases([model for model in chosen if model.family == family]):
            found.append(measure(case))
            print(line(found[-1]), flush=True)
        passed &= all(item.passes for item in found)
        if options.markdown:
            write_section(options.markdown, family, markdown(family, found))
    if options.markdown:
        write_section(
            options.markdown, "summary", summary([section(options.markdown.read_text(), name) for name in FAMILIES])
        )
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
