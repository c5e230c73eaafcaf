"""Runs `torch.nn`, `optim` and `distributions` on DTensors outside of `spmd.jit`: `python -m proofs.eager_nn_sweep`."""
