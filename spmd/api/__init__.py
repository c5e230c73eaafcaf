"""The public API: `jit`; in its folders `DTensor` and `distribute`, and operators and transforms outside of `jit`.

Imports any of the packages below it.
"""
