"""The machine that a plan is for: its constants, presets, and measuring them.

Imports `collectives` and `core`.
"""
