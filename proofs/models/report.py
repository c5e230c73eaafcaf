"""What the cases have shown, as lines and as a page."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import torch

from proofs.models.measure import LIMIT, STRATEGIES, TOLERANCE, Found
from proofs.models.routes import ROUTES, STEPS, Trial
from proofs.page import table


def line(found: Found) -> str:
    """One case on one line."""
    case = found.case
    what = f"{case.model.name}, {_kind(found)}, {case.strategy}"
    return f"{what}: {found.error or f'difference {found.difference:.0e}, {found.seconds:.1f} s'}"


def _kind(found: Found) -> str:
    return f"{'training' if found.case.training else 'forward'}{', mask' if found.case.masked else ''}"


def markdown(family: str, found: Sequence[Found]) -> str:
    """The cases of one family: a row for each model and kind of call, with times and differences, or errors."""
    rows = []
    for (model, kind), group in itertools.groupby(found, lambda item: (item.case.model, _kind(item))):
        rows.append((model.name, kind, *(_cell(item) for item in group)))
    models = {item.case.model.name for item in found}
    passed = sum(item.passes for item in found)
    slowest = max((item.seconds for item in found), default=0.0)
    text = (
        f"\n## {family[0].upper()}{family[1:]}\n\n{passed} of {len(found)} cases pass, of {len(models)} models; "
        f"the slowest plan took {slowest:.1f} s of processor time (torch {torch.__version__}).\n\n"
    )
    return text + "\n".join(table(("model", "call", *STRATEGIES), rows)) + "\n\n"


_COUNTS = re.compile(r"(\d+) of (\d+) cases pass, of (\d+) models; the slowest plan took ([\d.]+) s")


def summary(sections: Sequence[str]) -> str:
    """What the sections of all families say together."""
    counts = [match.groups() for match in map(_COUNTS.search, sections) if match]
    passed, cases, models = (sum(int(count[place]) for count in counts) for place in range(3))
    slowest = max((float(count[3]) for count in counts), default=0.0)
    return (
        f"{passed} of {cases} cases pass, of {models} models of {len(counts)} families; the slowest plan took "
        f"{slowest:.1f} s of processor time.\n"
    )


def _cell(found: Found) -> str:
    if found.error:
        return found.error[:160]
    differs = "" if found.difference < TOLERANCE else ", **differs**"
    slow = "" if found.seconds <= LIMIT else ", **too long**"
    return f"{found.seconds:.1f} s, {found.difference:.0e}{differs}{slow}"


def line_of_trial(trial: Trial) -> str:
    """One training on one line."""
    return f"{trial.case.model.name}, {trial.case.strategy}, {trial.case.route}: {_trial(trial)}, {trial.seconds:.1f} s"


def _trial(trial: Trial) -> str:
    differs = "" if trial.passes else ", **differs**"
    return trial.error[:160] or f"{trial.losses:.0e}, {trial.parameters:.0e}{differs}"


def markdown_of_routes(trials: Sequence[Trial]) -> str:
    """The trainings: how many pass by each route, and a row for each model and layout."""
    counts = []
    for route in ROUTES:
        found = [trial for trial in trials if trial.case.route == route]
        counts.append(f"{route}: {sum(trial.passes for trial in found)} of {len(found)}")
    rows = [
        (model.name, layout, *map(_trial, group))
        for (model, layout), group in itertools.groupby(trials, lambda trial: (trial.case.model, trial.case.strategy))
    ]
    text = (
        f"\n## Three routes\n\nThe same {STEPS} steps of AdamW: by torch.func and `spmd.optim` in one jitted step; by "
        "`.backward()` inside of a jitted step that takes the module; and by torch's own loop with `torch.optim.AdamW` "
        "on a module of `spmd.distribute_module`, outside of jit and under `spmd.implicit_replication()`, as models "
        "make plain tensors themselves. Beside torch's loop on one device: the largest differences of the losses and "
        "of the changes of the parameters. Fully sharded is on three ranks, which divide neither the batch of four nor "
        "the widths; tensor as above, two by two. Of the trainings pass, by route: "
    )
    return f"{text}{', '.join(counts)}.\n\n" + "\n".join(table(("model", "layout", *ROUTES), rows)) + "\n\n"
