"""From a Python function to a program: the recorder, functionalization, the lines of the user's code.

Imports `ir` and what is below it; `canonicalize` imports it, and nothing here imports `canonicalize`.
"""
