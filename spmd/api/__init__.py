"""What users call: `jit`, `DTensor`, `distribute`, and the way to and from torch's own DTensor.

Imports everything below it.
"""
