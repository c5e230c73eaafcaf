"""torch's own operator database run through `spmd.jit`, against plain torch: `python -m proofs.op_sweep`."""
