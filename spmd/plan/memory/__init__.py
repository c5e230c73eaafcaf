"""How much memory a plan takes, and planning under a limit.

Imports `cost` and `data`.
"""
