"""Transforms of torch.func and autograd around a jitted function: each is a program.

Imports `api.programs` and what is below it.
"""
