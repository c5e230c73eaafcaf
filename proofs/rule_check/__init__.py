"""The proof of all rules as a command: `python -m spmd.rules.check`."""
