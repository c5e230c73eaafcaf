"""Limits of what is found and compared for a function: code beyond them is not followed, values not watched."""

INSTRUCTIONS = 50_000
"""The most instructions that are followed."""

CALLS = 80
"""The most calls in calls that are followed."""

PASSES = 4
"""Over a loop: what its variables may be grows from one to the next."""

THINGS = 256
"""The most things that a value may be before it is anything."""

LENGTH = 10_000
"""The most characters or digits of a value that is computed here."""

DEPTH = 100
"""The most steps to what is compared."""

ITEMS = 8192
"""The most items of containers that are compared at a call."""

BYTES = 1 << 18
"""The most bytes of arrays that are compared at a call."""

NUMEL = 1024
"""The most elements of a tensor whose values are compared after a write."""

TESTS = 8
"""The most tests generated for values that are equal and not the same; then there is none."""
