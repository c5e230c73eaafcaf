"""Collectives between processes, run by torch.distributed.

Imports `collectives`, `core` and `job`.
"""
