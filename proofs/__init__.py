"""Tools that check the package: rules by execution, sweeps over torch's operators and modules, a fuzzer, optimal plans,
what processes hold, what jobs of many cost, faults beside busy processes, and scripts as people write them.

Not part of the wheel; run the commands in a clone: `python -m proofs.fuzz`, `proofs.op_sweep`, `proofs.nn_sweep`,
`proofs.memory_of_ranks`, `proofs.scale_of_jobs`, `proofs.faults_at_load`, `proofs.user_programs`.
"""
