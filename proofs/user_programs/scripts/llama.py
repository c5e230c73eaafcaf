"""A llama by hand, with accumulated gradients, clipping, an average of parameters, and checkpointing."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
torch.manual_seed(0)
vocab, width, heads, layers, accumulate, results = 16, 8, 2, 2, 2, []
params = {"embed": torch.randn(vocab, width), "head": torch.randn(width, vocab) * 0.1}
specs = {"embed": P("model"), "head": P(None, "model")}
for layer in range(layers):
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        rows, columns = (
            (2 * width, width) if name == "down" else (width, 2 * width if name in ("gate", "up") else width)
        )
        params[f"{layer}.{name}"] = torch.randn(rows, columns) * rows**-0.5
        specs[f"{layer}.{name}"] = P("model") if name in ("o", "down") else P(None, "model")


def norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def block(params, layer, x):
    q, k, v = ((norm(x) @ params[f"{layer}.{n}"]).unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ params[f"{layer}.o"]
    hidden = F.silu(norm(x) @ params[f"{layer}.gate"]) * (norm(x) @ params[f"{layer}.up"])
    return x + hidden @ params[f"{layer}.down"]


def loss_of(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    for layer in range(layers):
        x = checkpoint(block, params, layer, x, use_reentrant=False)
    return F.cross_entropy((norm(x) @ params["head"]).flatten(0, 1), tokens[:, 1:].flatten())


@spmd.jit((specs, specs, P(None, "data")), (specs, specs, P()), mesh=mesh)
def train_step(params, ema, batches):
    grads, loss = {name: torch.zeros_like(value) for name, value in params.items()}, 0.0
    for batch in batches.unbind():
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        value = loss_of(leaves, batch) / accumulate
        more = torch.autograd.grad(value, list(leaves.values()))
        grads = {name: grads[name] + new for name, new in zip(params, more, strict=True)}
        loss = loss + value.detach()
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    clip = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    params = {name: value - 0.1 * clip * grads[name] for name, value in params.items()}
    return params, {name: 0.9 * ema[name] + 0.1 * value for name, value in params.items()}, loss


ema = dict(params)
for step in range(20):
    params, ema, loss = train_step(params, ema, torch.randint(vocab, (accumulate, 4, 7)))
    grads, mean = params, loss.item()
    results += [loss, ema["head"]]
