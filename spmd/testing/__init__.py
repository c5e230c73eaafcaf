"""What tests of programs that use `spmd` share: Hypothesis strategies, an interpreter of graphs.

Nothing is imported here: take names from the modules, so that what needs Hypothesis stands alone.
"""
