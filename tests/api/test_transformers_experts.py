"""Mixtures of experts of transformers, differentiated by torch.func inside, beside one device."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

import spmd
from spmd import P

transformers = pytest.importorskip("transformers")
LINE = spmd.make_mesh({"x": 2}, runtime="virtual")
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
MODELS = {"mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4}, "gpt_oss": {"num_local_experts": 4}}


def model_of(kind: str, experts: str) -> torch.nn.Module:
    """A small model; `experts` names transformers' implementation of its experts."""
    config = transformers.AutoConfig.for_model(kind, **SIZES, **MODELS[kind])
    if kind == "gpt_oss":
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts)  # type: ignore[no-any-return]


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_one_device(kind: str, experts: str) -> None:
    model = model_of(kind, experts)
    ids = torch.randint(0, 32, (5, 4))

    def loss(params: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return functional_call(model, params, (ids,), {"labels": ids, "use_cache": False}).loss  # type: ignore[no-any-return]

    params = dict(model.named_parameters())
    loss(params, ids).backward()
    expected = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in params.items()}
    mesh = spmd.make_mesh({"x": 3}, runtime="virtual")
    held = {name: x.detach() for name, x in params.items()}
    found = spmd.jit(torch.func.grad(loss), (P(), P("x")), mesh=mesh)(held, ids)
    torch.testing.assert_close({name: x.full_tensor() for name, x in found.items()}, expected)


def test_experts_that_loop_over_those_that_are_hit_are_refused_with_what_to_call() -> None:
    model, ids = model_of("mixtral", "eager"), torch.zeros(4, 4, dtype=torch.int64)
    step = spmd.jit(lambda model, ids: model(ids, use_cache=False).logits, (None, P("x")), mesh=LINE)
    with (
        torch.no_grad(),
        pytest.raises(
            spmd.TraceError, match=r"depends on the values .* model\.set_experts_implementation\('grouped_mm'\)"
        ),
    ):
        step(model, ids)
    model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    with torch.no_grad():
        torch.testing.assert_close(step(model, ids).full_tensor(), model(ids, use_cache=False).logits)
