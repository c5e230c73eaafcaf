"""Collectives between processes, run by torch.distributed.

Imports `collectives` and what is below it.
"""
