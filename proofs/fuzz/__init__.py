"""A fuzzer: random whole programs on virtual ranks, against one device; `python -m proofs.fuzz` runs many of them."""
