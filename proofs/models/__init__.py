"""Stock models of transformers, torchvision, timm and diffusers under `jit`, beside one device."""
