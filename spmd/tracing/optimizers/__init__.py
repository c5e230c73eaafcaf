"""Optimizer steps that were written as elementwise operators, recognised by what they compute.

Imports `ir` and `core`; `api` runs `recognition` on canonical programs.
"""
