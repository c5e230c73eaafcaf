"""The models: random weights from a configuration, two layers, a batch of four. Nothing is downloaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn

Inputs: TypeAlias = dict[str, torch.Tensor]

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SIZES, **TEXT, "num_key_value_heads": 2, "head_dim": 4, "use_cache": False}
ENCODER = {**SIZES, **TEXT}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "use_cache": False}
BART = {"vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
        "use_cache": False}  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False}
VIT = {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 8}
SPEECH = {**SIZES, "vocab_size": 32, "conv_dim": (16, 16), "conv_kernel": (4, 2), "conv_stride": (2, 2),
          "num_feat_extract_layers": 2, "layerdrop": 0.0, "apply_spec_augment": False,
          "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}  # fmt: skip
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip


def prepare_torchvision() -> None:
    """Let torchvision be imported beside a torch for CPUs, where its own operators do not load; no model calls them."""
    for name in () if torch.version.cuda else ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@attrs.frozen
class Model:
    """A model and its inputs.

    Args:
        name: its name on the page.
        family: the kind of model.
        make: makes the module; of transformers, with another number of layers, if it is given.
        inputs: makes the inputs by name; the first dim of each is the batch.
        masks: makes the masks that the inputs may have; empty if it takes none.
        training: further inputs for training: labels.
        backward: whether gradients are those of torch.autograd.grad; else of torch.func.
        trains: whether it can be trained: not with a static cache, which is written to between two uses.
    """

    name: str
    family: str
    make: Callable[..., nn.Module]
    inputs: Callable[[], Inputs]
    masks: Callable[[], Inputs] = dict
    training: Callable[[], Inputs] = dict
    backward: bool = False
    trains: bool = True

    @property
    def takes_layers(self) -> bool:
        """Whether it can be made with another number of layers."""
        return "layers" in inspect.signature(self.make).parameters


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def tokens() -> torch.Tensor:
    """Tokens of four sequences."""
    return torch.randint(3, 60, (4, 8), generator=_generator())


def mask() -> torch.Tensor:
    """A mask of sequences of which some are padded."""
    return (torch.arange(8) < torch.tensor([[8], [5], [7], [8]])).long()


def randn(*shape: int) -> torch.Tensor:
    """A batch of four random tensors."""
    return torch.randn((4, *shape), dtype=torch.float64, generator=_generator())


def _text() -> Inputs:
    return {"input_ids": tokens()}


def _mask() -> Inputs:
    return {"attention_mask": mask()}


def _labels() -> Inputs:
    return {"labels": tokens()}


_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "n_layer")


def _made(name: str, config: str, options: Mapping[str, Any]) -> Callable[..., nn.Module]:
    def make(layers: int | None = None) -> nn.Module:
        import transformers

        deeper = {option: layers for option in _LAYERS if option in options and layers is not None}
        found: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**{**options, **deeper}))
        return found

    return make


def _causal(name: str, kind: str, family: str = "decoder", **options: Any) -> Model:
    held = {**DECODER, **options}
    return Model(name, family, _made(f"{kind}ForCausalLM", f"{kind}Config", held), _text, _mask, _labels)


def _encoder(name: str, kind: str, **options: Any) -> Model:
    held = {**ENCODER, **options}
    return Model(name, "encoder", _made(f"{kind}ForMaskedLM", f"{kind}Config", held), _text, _mask, _labels)


def _seq2seq(name: str, kind: str, options: Mapping[str, Any]) -> Model:
    make = _made(f"{kind}ForConditionalGeneration", f"{kind}Config", options)
    inputs = lambda: {"input_ids": tokens(), "decoder_input_ids": tokens()}  # noqa: E731
    return Model(name, "encoder-decoder", make, inputs, _mask, _labels)


def _image(name: str, kind: str, **options: Any) -> Model:
    make = _made(f"{kind}ForImageClassification", f"{kind}Config", {**VIT, **options})
    return Model(name, "vision transformer", make, lambda: {"pixel_values": randn(3, 16, 16)})


def _speech(name: str, kind: str, **options: Any) -> Model:
    make = _made(f"{kind}Model", f"{kind}Config", {**SPEECH, **options})
    return Model(name, "speech", make, lambda: {"input_values": randn(80)})


def _torchvision(name: str, family: str, **options: Any) -> Model:
    def make() -> nn.Module:
        import torchvision

        found: nn.Module = getattr(torchvision.models, name)(num_classes=8, **options)
        return found

    return Model(f"torchvision {name}", family, make, lambda: {"x": randn(3, 32, 32)})


def _timm(name: str, family: str, **options: Any) -> Model:
    def make() -> nn.Module:
        import timm

        found: nn.Module = timm.create_model(name, pretrained=False, num_classes=8, **options)
        return found

    return Model(f"timm {name}", family, make, lambda: {"x": randn(3, 32, 32)})


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    found: nn.Module = UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        norm_num_groups=4, attention_head_dim=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return found


class Cached(nn.Module):
    """A decoder that reads a prompt into a static cache, and then one more token."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder: Any = _made("LlamaForCausalLM", "LlamaConfig", {**DECODER, "use_cache": True})()

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the prompt and of the token after it."""
        from transformers import StaticCache

        cache = StaticCache(config=self.decoder.config, max_cache_len=12)
        prompt = self.decoder(input_ids=input_ids, past_key_values=cache, use_cache=True).logits
        after = self.decoder(input_ids=input_ids[:, -1:], past_key_values=cache, use_cache=True).logits
        return prompt, after


def _checkpointed(model: Model) -> Model:
    """A model that computes its layers again in the backward pass, which transformers does not do under torch.func."""

    def make(layers: int | None = None) -> nn.Module:
        module = model.make(layers)
        module.gradient_checkpointing_enable()  # type: ignore[operator]
        return module

    return attrs.evolve(model, name=f"{model.name}, gradient checkpointing", make=make, backward=True)


class Recurrent(nn.Module):
    """A language model with a recurrent layer of torch.nn."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(64, 16), kind(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next tokens."""
        return self.head(self.layers(self.embedding(input_ids))[0])  # type: ignore[no-any-return]


_STAGES = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "num_labels": 8,
}

MODELS: tuple[Model, ...] = (
    _causal("llama", "Llama"),
    _causal("mistral", "Mistral"),
    _causal("qwen2", "Qwen2", tie_word_embeddings=True),
    _causal("qwen3", "Qwen3"),
    _causal("gemma", "Gemma"),
    _causal("phi", "Phi"),
    Model("gpt2", "decoder", _made("GPT2LMHeadModel", "GPT2Config", GPT2), _text, _mask, _labels),
    _causal("gpt-neox", "GPTNeoX"),
    _checkpointed(_causal("llama", "Llama")),
    Model("llama, static cache", "decoder", Cached, _text, trains=False),
    _encoder("bert", "Bert"),
    _checkpointed(_encoder("bert", "Bert")),
    _encoder("roberta", "Roberta", max_position_embeddings=40),
    _encoder("electra", "Electra", embedding_size=16),
    Model("distilbert", "encoder", _made("DistilBertForMaskedLM", "DistilBertConfig",
          {"vocab_size": 64, "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}),
          _text, _mask, _labels),
    _seq2seq("t5", "T5", T5),
    _seq2seq("bart", "Bart", BART),
    _checkpointed(_seq2seq("bart", "Bart", BART)),
    _image("vit", "ViT"),
    _image("deit", "DeiT"),
    _image("beit", "Beit"),
    _timm("vit_tiny_patch16_224", "vision transformer", img_size=32, depth=2),
    _timm("swin_tiny_patch4_window7_224", "vision transformer", img_size=32, window_size=4, embed_dim=16,
          depths=(1, 1), num_heads=(2, 4)),
    Model("resnet (transformers)", "convolutional", _made("ResNetForImageClassification", "ResNetConfig",
          _STAGES), lambda: {"pixel_values": randn(3, 16, 16)}),
    _torchvision("squeezenet1_1", "convolutional"),
    _torchvision("resnet18", "convolutional"),
    _timm("convnext_atto", "convolutional", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    _causal("mamba", "Mamba", "state space", state_size=4, expand=2, num_key_value_heads=4),
    _causal("mamba2", "Mamba2", "state space", state_size=4, num_heads=8, n_groups=1, chunk_size=4),
    _causal("mixtral", "Mixtral", "mixture of experts", num_local_experts=4, num_experts_per_tok=2,
            experts_implementation="batched_mm"),
    _causal("qwen3-moe", "Qwen3Moe", "mixture of experts", num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=16, experts_implementation="batched_mm"),
    Model("whisper", "speech", _made("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
          lambda: {"input_features": randn(8, 16), "decoder_input_ids": tokens()}, training=_labels),
    _speech("wav2vec2", "Wav2Vec2"),
    _speech("hubert", "Hubert"),
    Model("UNet2DModel (diffusers)", "diffusion U-Net", _unet,
          lambda: {"sample": randn(3, 8, 8), "timestep": torch.tensor([1, 5, 7, 9])}),
    Model("nn.LSTM", "recurrent", lambda: Recurrent(nn.LSTM), _text),
    Model("nn.GRU", "recurrent", lambda: Recurrent(nn.GRU), _text),
)  # fmt: skip

FAMILIES = tuple(dict.fromkeys(model.family for model in MODELS))
"""The families of the models."""
