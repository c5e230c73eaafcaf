"""What a rank runs for each operation of a plan: operators on local tensors, collectives, local implementations.

Imports `plan.data`, `tracing`, `rules` and the packages below them.
"""
