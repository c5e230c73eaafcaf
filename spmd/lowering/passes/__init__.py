"""Passes over the program of a rank.

Imports `ir`, `rules` and `collectives`; `lowering` imports it.
"""
