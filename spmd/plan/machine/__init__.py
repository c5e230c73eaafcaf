"""The machine that a plan is for: its cost constants, presets of them, and measurements of them.

Imports `collectives` and `core`.
"""
