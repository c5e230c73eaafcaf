"""Stock models on the meta device: initialized equally on every mesh, altogether, and as their constructors do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from initialized_modules import assert_equal, on_meta, state
from sampling import sample
from torch import nn

import spmd
from proofs.models.cases import prepare_torchvision

prepare_torchvision()

MESHES = [{"x": 1}, {"x": 4}, {"x": 2, "y": 2}]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 128, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, vocab_size=128, bos_token_id=1, eos_token_id=2)
    )


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=16, patch_size=4))


def unet() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def timm_vit() -> nn.Module:
    module = pytest.importorskip("timm.models.vision_transformer")
    return module.VisionTransformer(img_size=16, patch_size=4, embed_dim=64, depth=2, num_heads=4, num_classes=10)


MODELS = {make.__name__: make for make in (llama, gpt2, bert, vit, unet, timm_vit)}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory that nothing has written to is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)  # by which torch.utils.deterministic.fill_uninitialized_memory acts
    yield
    torch.use_deterministic_algorithms(False)


def initialized(make: Callable[[], nn.Module], axes: dict[str, int], constructs: bool) -> nn.Module:
    module, mesh = on_meta(make), spmd.make_mesh(axes, runtime="virtual")
    torch.manual_seed(0)
    init = (lambda _: make()) if constructs else None
    return spmd.materialize(module, spmd.fsdp_specs(module, "x"), mesh, init=init)


@pytest.mark.parametrize("name", sample(MODELS, MODELS.keys() - {"unet"}))
@pytest.mark.parametrize("constructs", [False, True], ids=["own methods", "constructor"])
def test_a_model_is_initialized_as_its_constructor_does(name: str, constructs: bool) -> None:
    assert torch.empty(3).isnan().all()
    first, *others = (state(initialized(MODELS[name], axes, constructs)) for axes in MESHES)
    for other in others:
        assert_equal(first, other)
    torch.manual_seed(1)
    expected = state(MODELS[name]())
    assert expected.keys() == first.keys()
    for key, value in expected.items():
        found = first[key]
        assert (value.shape, value.dtype) == (found.shape, found.dtype)
        if not value.is_floating_point() or value.numel() == 1 or value.std() == 0 or "freq" in key:
            torch.testing.assert_close(found, value, msg=key)
            continue
        deviation = value.std().item()
        assert found.isfinite().all()
        assert found.std().item() == pytest.approx(deviation, rel=4 / value.numel() ** 0.5), key
        assert abs(found.mean() - value.mean()).item() <= 8 * deviation / value.numel() ** 0.5, key
