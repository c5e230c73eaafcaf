"""What a plan costs: arithmetic, local time of every operation, and the account of a finished plan.

Imports `data`, `machine` and `rules`.
"""
