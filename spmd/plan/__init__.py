"""Planning: from a program over global tensors to a spec for every value and a strategy for every operation.

Imports `tracing`, `rules` and the packages below them. Reports about finished plans are in `spmd.inspect`.
"""
