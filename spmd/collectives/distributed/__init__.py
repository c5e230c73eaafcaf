"""Collectives between processes, by torch.distributed.

Imports `collectives`, `core` and `job`.
"""
