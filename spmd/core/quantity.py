"""Amounts of memory and times as text: parsing and formatting."""

from __future__ import annotations

import re

from spmd.errors import PlanError

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(amount: int | str, what: str) -> int:
    """Parse a number of bytes, or a text with a unit: kB, MB, GB, TB are decimal, KiB, MiB, GiB, TiB binary.

    Args:
        amount: the number or the text.
        what: the name of the option, for error messages.

    Raises:
        PlanError: a negative number, a text that is not an amount, or another type.

    >>> parse_bytes("80GB", "memory_limit"), parse_bytes("1.5 MiB", "memory_limit"), parse_bytes(7, "memory_limit")
    (80000000000, 1572864, 7)
    """
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0:
        return amount
    if isinstance(amount, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", amount)
        if found and found[2] in _UNITS:
            return int(float(found[1]) * _UNITS[found[2]])
    raise PlanError(
        f"{what} must be a number of bytes, or a text such as '80GB' or '512MiB' (got {amount!r}). "
        f"Units are {', '.join(_UNITS)}."
    )


def size_text(nbytes: float) -> str:
    """Format a number of bytes with three significant digits, in decimal units.

    >>> size_text(6_514_000), size_text(12)
    ('6.51 MB', '12 B')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def time_text(seconds: float) -> str:
    """Format a time, given in seconds, with three significant digits: in ns, if it is less than ten, us, ms or s.

    >>> time_text(3.3e-09), time_text(5.2e-07), time_text(0.25), time_text(0)
    ('3.3 ns', '0.52 us', '250 ms', '0 us')
    """
    if 0 < seconds < 1e-8:
        return f"{seconds * 1e9:.3g} ns"
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"
