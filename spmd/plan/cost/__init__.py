"""The cost of a plan: operation counts, the local time of every operation, and the account of a finished plan.

Imports `data`, `machine` and `rules`.
"""
