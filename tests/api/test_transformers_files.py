"""Files of transformers: `save_pretrained` of distributed modules, and what loads make of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from workers import Workers, call_on_mesh

import spmd
from spmd import P
from spmd.errors import ShardingError

transformers = pytest.importorskip("transformers")

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")


def make(name: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, **sizes))
    tied = {"tie_word_embeddings": name == "tied", "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(num_hidden_layers=2, num_key_value_heads=1, **sizes, **tied)
    return transformers.LlamaForCausalLM(config)


def distributed(model: Any, mesh: spmd.Mesh) -> Any:
    specs = lambda name, module, mesh: {key: P("data") for key, _ in module.named_parameters(recurse=False)}  # noqa: E731
    return spmd.distribute_module(model, mesh, specs)


def round_trip(name: str, folder: Path, mesh: spmd.Mesh) -> None:
    expected = make(name).state_dict()
    model = distributed(make(name), mesh)
    model.save_pretrained(folder)
    assert all(isinstance(parameter, spmd.DTensor) for parameter in model.parameters())
    if mesh.runtime.value == "distributed":
        spmd.distribute(torch.ones(2), P(), mesh)  # all wait for the rank that writes
    made = type(model).from_pretrained(folder)
    for key, value in made.state_dict().items():
        assert torch.equal(value, expected[key]), key
    again = distributed(made, mesh)
    other = distributed(type(model)(model.config), mesh)
    other.load_state_dict(expected)
    for key, value in expected.items():
        assert torch.equal(again.state_dict()[key].full_tensor(), value), key
        assert torch.equal(other.state_dict()[key].full_tensor(), value), key


@pytest.mark.parametrize("name", ["untied", "tied", "bert"])
def test_files_of_distributed_modules(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        round_trip(name, tmp_path, MESH)


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    from safetensors import safe_open

    distributed(make("tied"), MESH).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.embed_tokens.weight" in file.keys() and "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_storages_stay_refused(tmp_path: Path) -> None:
    model = distributed(make("bert"), MESH)
    state = model.state_dict()
    model.save_pretrained(tmp_path, state_dict=dict(state))
    for value in state.values():
        with pytest.raises(ShardingError, match="untyped_storage"):
            value.untyped_storage()


def _on_processes(folder: str, mesh: spmd.Mesh) -> None:
    round_trip("tied", Path(folder), mesh)


def test_files_on_processes(workers: Workers, tmp_path: Path) -> None:
    workers.run(call_on_mesh, _on_processes, {"data": 2}, "distributed", str(tmp_path), ranks=2)
