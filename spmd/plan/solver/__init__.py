"""Minimising a sum of tables over variables with few values each: exactly, or by large-neighbourhood search.

Knows nothing of programs; imports `errors` only.
"""
