"""A lower bound of what ranks send for an operator, beside its plan: `python -m proofs.least_sent`."""
