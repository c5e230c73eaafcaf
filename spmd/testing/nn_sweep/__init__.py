"""Modules of `torch.nn`, and functions that op_db lacks, through `spmd.jit`: `python -m spmd.testing.nn_sweep`."""
