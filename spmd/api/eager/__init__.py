"""Operators on DTensors outside of `jit`: each is a program, found by a key.

Imports `api.programs` and what is below it.
"""
