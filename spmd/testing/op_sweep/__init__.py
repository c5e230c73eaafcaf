"""torch's own operator database run through `spmd.jit`, against plain torch: `python -m spmd.testing.op_sweep`."""
