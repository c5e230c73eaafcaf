"""Every distribution of `torch.distributions` under `jit`, beside one device."""
