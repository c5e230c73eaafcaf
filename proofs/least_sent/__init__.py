"""What ranks must at least send for an operator, beside what its plan sends: `python -m proofs.least_sent`."""
