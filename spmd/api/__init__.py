"""The public API: `jit`, `DTensor`, `distribute`, and conversion to and from torch's own DTensor.

Imports any of the packages below it.
"""
