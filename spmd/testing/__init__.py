"""What tests of programs that use `spmd` share: Hypothesis strategies, and what a program really sends and holds.

Nothing is imported here: take names from the modules, so that what needs Hypothesis stands alone.
"""
