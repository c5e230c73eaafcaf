"""What proves the package: rules by execution, sweeps over torch's operators and modules, the fuzz, optima.

Not part of the wheel; commands run in a clone: `python -m proofs.fuzz`, `proofs.op_sweep`, `proofs.nn_sweep`.
"""
