"""Runs modules of `torch.nn`, and functions that op_db lacks, through `spmd.jit`: `python -m proofs.nn_sweep`."""
