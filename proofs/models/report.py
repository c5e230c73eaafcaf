"""What the cases have shown, as lines and as a page."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from proofs.models.measure import STRATEGIES, Found
from proofs.page import table


def line(found: Found) -> str:
    """One case on one line."""
    case = found.case
    what = f"{case.model.name}, {_kind(found)}, {case.strategy}"
    return f"{what}: {found.error or f'difference {found.difference:.0e}, {found.seconds:.1f} s'}"


def _kind(found: Found) -> str:
    return f"{'training' if found.case.training else 'forward'}{', mask' if found.case.masked else ''}"


def markdown(found: Sequence[Found]) -> str:
    """A row for each model and kind of call: seconds of each plan, or what went wrong."""
    rows = []
    for (model, kind), group in itertools.groupby(found, lambda item: (item.case.model, _kind(item))):
        rows.append((model.name, model.family, kind, *(_cell(item) for item in group)))
    families = {item.case.model.family for item in found}
    models = {item.case.model.name for item in found}
    passed = sum(item.passes for item in found)
    slowest = max((item.seconds for item in found), default=0.0)
    summary = (
        f"{passed} of {len(found)} cases pass, of {len(models)} models of {len(families)} families; the slowest plan "
        f"took {slowest:.1f} s of processor time.\n\n"
    )
    return summary + "\n".join(table(("model", "family", "call", *STRATEGIES), rows)) + "\n"


def _cell(found: Found) -> str:
    if found.error:
        return found.error[:160]
    return f"{found.seconds:.1f} s" if found.passes else f"{found.seconds:.1f} s, difference {found.difference:.0e}"
