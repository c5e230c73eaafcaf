"""Calls under `spmd.disable_jit`: functions run as they are written, rank by rank.

Imports everything but `api.jit` and `api.shard_map`, which import it.
"""
