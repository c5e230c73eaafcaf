"""The proof of all rules as a command: `python -m proofs.rule_check`."""
