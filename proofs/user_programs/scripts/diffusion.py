"""Denoising diffusion: schedules are closed-over tensors."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
betas = torch.linspace(1e-4, 0.02, 50)
alphas = (1 - betas).cumprod(0)
params, results = {"w": torch.randn(6, 6) * 0.1, "t": torch.randn(50, 6) * 0.1}, []


def denoise_loss(params, x, t, noise):
    keep = alphas[t][:, None]
    noisy = keep.sqrt() * x + (1 - keep).sqrt() * noise
    return (noisy @ params["w"] + params["t"][t] - noise).square().mean()


@spmd.jit((P(), *(P("data"),) * 3), P(), mesh=mesh)
def train(params, x, t, noise):
    grads, loss = torch.func.grad_and_value(denoise_loss)(params, x, t, noise)
    return {name: value - 0.1 * grads[name] for name, value in params.items()}, loss


for step in range(20):
    params, loss = train(params, torch.randn(10, 6), torch.randint(50, (10,)), torch.randn(10, 6))
    sqrt, square, noise = loss, params["w"], params
    results.append(loss)
