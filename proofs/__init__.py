"""Tools that check the package: rules by execution, sweeps over torch's operators and modules, a fuzzer, optimal plans,
what processes hold, and what jobs of many cost.

Not part of the wheel; run the commands in a clone: `python -m proofs.fuzz`, `proofs.op_sweep`, `proofs.nn_sweep`,
`proofs.memory_of_ranks`, `proofs.scale_of_jobs`.
"""
