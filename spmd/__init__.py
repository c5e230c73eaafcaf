"""A JAX-style SPMD library over PyTorch: a function for one device becomes the program that each rank runs."""

__version__ = "0.1.0"
