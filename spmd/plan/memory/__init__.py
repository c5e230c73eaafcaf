"""The memory of a plan, and planning under a memory limit.

Imports `lowering`, `cost` and `data`.
"""
