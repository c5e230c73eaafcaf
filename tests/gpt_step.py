"""One layer of a GPT and a step of gradient descent: a small program with every collective of tensor parallelism."""

import torch
import torch.nn.functional as F

from spmd import P


def gpt_step(params: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        x = F.embedding(tokens, params["tokens"])
        batch, length, width = x.shape
        q, k, v = (F.linear(x, params[n]).view(batch, length, 4, width // 4).transpose(1, 2) for n in ("q", "k", "v"))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
        x = x + F.linear(mixed.transpose(1, 2).reshape(x.shape), params["o"])
        x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,)), params["up"])), params["down"])
        return F.cross_entropy(F.linear(x, params["tokens"]).view(batch * length, -1), tokens.view(-1))

    grads = torch.func.grad(loss)(params)
    return {name: params[name] - 0.1 * grads[name] for name in params}


SHAPES = {
    "tokens": (64, 32),
    "q": (32, 32),
    "k": (32, 32),
    "v": (32, 32),
    "o": (32, 32),
    "up": (128, 32),
    "down": (32, 128),
}
TENSOR_PARALLEL = {
    "tokens": P("x"), "q": P("x"), "k": P("x"), "v": P("x"), "o": P(None, "x"), "up": P("x"), "down": P(None, "x"),
}  # fmt: skip
