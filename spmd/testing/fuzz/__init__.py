"""Random whole programs on virtual ranks against one device; `python -m spmd.testing.fuzz` runs many of them."""
