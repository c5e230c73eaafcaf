"""Runs torch's own operator database through `spmd.jit`, against plain torch: `python -m proofs.op_sweep`."""
