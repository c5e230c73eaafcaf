"""A traced function as a program that runs: its options, and each stage made at its first use.

Imports `api.values` and what is below it.
"""
