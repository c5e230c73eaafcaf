"""Tensor-parallel specs of the models of transformers, with random weights; skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_tensor_parallel_specs import COLUMN, MESHES, ROW, WHOLE, check

import spmd
from spmd import P
from spmd.core.pytree import tree_map

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 32, "max_position_embeddings": 16}
LLAMA = {**SIZES, **TEXT, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens() -> torch.Tensor:
    return torch.randint(32, (2, 6), generator=torch.Generator().manual_seed(0))


def causal() -> dict[str, torch.Tensor]:
    """The causal mask is given: transformers reads values of the tensors from which it would make one."""
    mask = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    return {"input_ids": tokens(), "attention_mask": mask}


def made(name: str, config: str, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**options)).double().eval()  # type: ignore[no-any-return]


GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "use_cache": False}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
VIT = {**SIZES, **NO_DROPOUT, "image_size": 8, "patch_size": 4, "num_labels": 8}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "use_cache": False}

MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "llama": (lambda: made("LlamaForCausalLM", "LlamaConfig", **LLAMA, num_key_value_heads=2), causal),
    "qwen2": (
        lambda: made("Qwen2ForCausalLM", "Qwen2Config", **LLAMA, num_key_value_heads=2, tie_word_embeddings=True),
        causal,
    ),
    "gpt2": (lambda: made("GPT2LMHeadModel", "GPT2Config", **GPT2), causal),
    "bert": (
        lambda: made("BertForMaskedLM", "BertConfig", **SIZES, **TEXT, **NO_DROPOUT),
        lambda: {"input_ids": tokens()},
    ),
    "vit": (
        lambda: made("ViTForImageClassification", "ViTConfig", **VIT),
        lambda: {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)},
    ),
    "t5": (
        lambda: made("T5ForConditionalGeneration", "T5Config", **T5, dropout_rate=0.0),
        lambda: {"input_ids": tokens(), "decoder_input_ids": tokens()[:, :5]},
    ),
}

LLAMA_HEADS = {"q_proj.weight": COLUMN, "k_proj.weight": COLUMN, "v_proj.weight": COLUMN, "o_proj.weight": ROW}
LLAMA_MLP = {"gate_proj.weight": COLUMN, "up_proj.weight": COLUMN, "down_proj.weight": ROW}
LLAMA_MLP |= {"embed_tokens.weight": COLUMN, "lm_head.weight": COLUMN}
QWEN_HEADS = {**LLAMA_HEADS, "q_proj.bias": COLUMN, "k_proj.bias": COLUMN, "v_proj.bias": COLUMN}
GPT2_SHARDED = {"wte.weight": COLUMN, "c_fc.weight": ROW, "c_fc.bias": COLUMN, "mlp.c_proj.weight": COLUMN}
GPT2_SHARDED |= {"attn.c_proj.weight": COLUMN}  # Conv1D has its weight transposed
BERT_SHARDED = {
    f"{name}.{kind}": COLUMN for name in ("query", "key", "value", "intermediate.dense") for kind in ("weight", "bias")
}
BERT_SHARDED |= {"output.dense.weight": ROW, "word_embeddings.weight": COLUMN, "predictions.bias": COLUMN}
VIT_SHARDED = {
    f"{name}.{kind}": COLUMN
    for name in ("q_proj", "k_proj", "v_proj", "fc1", "classifier")
    for kind in ("weight", "bias")
}
VIT_SHARDED |= {"o_proj.weight": ROW, "fc2.weight": ROW}
T5_SHARDED = {f"{name}.weight": COLUMN for name in ("q", "k", "v", "wi", "shared")}
T5_SHARDED |= {f"{name}.weight": ROW for name in ("o", "wo", "relative_attention_bias")}


@pytest.mark.parametrize(
    ("model", "ranks", "sharded", "sums"),
    [
        ("llama", 2, LLAMA_HEADS | LLAMA_MLP, 5),
        ("llama", 4, LLAMA_MLP, 3),  # two heads of keys on four ranks
        ("qwen2", 2, QWEN_HEADS | LLAMA_MLP, 5),
        ("gpt2", 4, GPT2_SHARDED, 5),
        ("bert", 4, BERT_SHARDED, 5),
        ("vit", 2, VIT_SHARDED, 4),
        ("t5", 2, T5_SHARDED, 12),  # two sums a layer of the encoder, three of the decoder, two embeddings
    ],
)
def test_models(model: str, ranks: int, sharded: dict[str, P], sums: int) -> None:
    make, inputs = MODELS[model]
    module, kwargs, mesh = make(), inputs(), MESHES[ranks]
    layout = spmd.tensor_parallel_specs(module, "model", (), kwargs, mesh=mesh)
    expected = {
        name: next((spec for end, spec in sharded.items() if f".{name}".endswith(f".{end}")), WHOLE) for name in layout
    }
    assert expected == layout
    check(module, layout, (), kwargs, mesh, sums)


def test_a_static_cache_as_argument_and_result() -> None:
    """Two calls add keys and values; the function copies the cache, as it must not write to its argument."""
    heads = {"num_hidden_layers": 1, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**{**LLAMA, **heads})
    given, alone = (transformers.StaticCache(config=config, max_cache_len=6) for _ in range(2))
    for cache in (given, alone):
        cache.early_initialization(4, 2, 4, torch.float64, torch.device("cpu"))

    def step(cache: Any, x: torch.Tensor) -> Any:
        cache = tree_map(torch.clone, cache)
        keys, values = cache.update(x.sin(), x.cos(), 0)
        return cache, (keys * values).sum(-1)

    mesh = MESHES[2]
    jitted = spmd.jit(step, (None, P("model")), mesh=mesh)
    for seed in range(2):
        x = torch.randn(4, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        (given, found), (alone, expected) = jitted(given, x), step(alone, x)
        torch.testing.assert_close(found.full_tensor(), expected)
        for name in ("keys", "values", "cumulative_length"):
            value = getattr(given.layers[0], name)
            torch.testing.assert_close(value.full_tensor(), getattr(alone.layers[0], name))
