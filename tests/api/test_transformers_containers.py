"""transformers' outputs, encodings and caches as arguments and results, against one device; skipped without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd import P
from spmd.core.pytree import tree_leaves, tree_map

transformers = pytest.importorskip("transformers")

MESHES = [{"data": 2}, {"data": 3}, {"data": 2, "model": 2}]
CONFIG = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def output(x: torch.Tensor) -> Any:
    return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x.sin(), hidden_states=(x, x * 2))


def next_output(given: Any) -> Any:
    states = (given.hidden_states[0] * given.hidden_states[1], given[0])
    return transformers.modeling_outputs.BaseModelOutput(
        last_hidden_state=given.last_hidden_state.cos(), hidden_states=states
    )


def encoding(x: torch.Tensor) -> Any:
    return transformers.BatchEncoding({"input_ids": torch.arange(20).reshape(5, 4) % 3, "weights": x})


def next_encoding(given: Any) -> Any:
    table = torch.arange(3.0, dtype=torch.float64)
    return transformers.BatchEncoding(
        {"input_ids": given["input_ids"] + 1, "weights": given.weights * table[given.input_ids % 3]}
    )


def cache(x: torch.Tensor) -> Any:
    made = transformers.DynamicCache(config=transformers.LlamaConfig(**CONFIG))
    for layer in range(2):
        made.update(x[:, None, :, None] * (layer + 1), x[:, None, :, None].sin(), layer)
    return made


def next_cache(given: Any) -> Any:
    last = given.layers[1].values[:, :, -1:]
    for layer in range(2):
        given.update(last.sin(), last.cos(), layer)
    return given


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ModelOutput": (output, next_output),
    "BatchEncoding": (encoding, next_encoding),
    "DynamicCache": (cache, next_cache),
}


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_types_and_gradients_are_those_of_one_device(kind: str, axes: dict[str, int]) -> None:
    make, function = KINDS[kind]
    mesh, alone = spmd.make_mesh(axes, runtime="virtual"), randn(5, 4).requires_grad_()
    expected = function(function(make(alone)))
    jitted = spmd.jit(function, (P("data"),), P("data"), mesh=mesh)
    leaf = spmd.distribute(alone.detach(), P("data"), mesh).requires_grad_()
    found = jitted(jitted(make(leaf)))  # results are arguments
    assert type(expected) is type(found)
    floats = [[x for x in tree_leaves(tree) if x.is_floating_point()] for tree in (found, expected)]
    for one, other in zip(*floats, strict=True):
        assert one.spec.pspec == P("data")
        torch.testing.assert_close(one.detach().full_tensor(), other.detach())
    for leaves in floats:
        sum(x.sin().sum() for x in leaves).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(leaf.grad.full_tensor(), alone.grad)  # type: ignore[union-attr]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return sum((y.sin().sum() for y in tree_leaves(function(make(x))) if y.is_floating_point()), x.new_zeros(()))

    inside = spmd.jit(torch.func.grad(loss), P("data"), mesh=mesh)(alone.detach())
    torch.testing.assert_close(inside.full_tensor(), torch.func.grad(loss)(alone.detach()))


def test_an_encoding_is_passed_by_names() -> None:
    mesh, x = spmd.make_mesh({"data": 2}, runtime="virtual"), randn(5, 4)
    function = lambda input_ids, weights=None, **others: (weights * input_ids).sum(1)  # noqa: E731
    jitted = spmd.jit(function, {"input_ids": P("data"), "weights": P("data")}, mesh=mesh)
    torch.testing.assert_close(jitted(**encoding(x)).full_tensor(), function(**encoding(x)))


def test_a_model_generates_with_a_growing_cache() -> None:
    config = transformers.LlamaConfig(**CONFIG)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    params = {name: value.detach() for name, value in model.named_parameters()}
    tokens = torch.randint(16, (4, 5), generator=torch.Generator().manual_seed(0))

    def step(params: Any, past: Any, tokens: torch.Tensor) -> Any:
        found = torch.func.functional_call(
            model, params, (), {"input_ids": tokens, "past_key_values": past, "use_cache": True}
        )
        return found.logits, found.past_key_values

    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    jitted = spmd.jit(step, (P(), P("data"), P("data")), (P("data"), P("data")), mesh=mesh)
    mine, alone = (transformers.DynamicCache(config=config) for _ in range(2))
    for given in (tokens, tokens[:, -1:], tokens[:, :1]):
        (found, mine), (expected, alone) = jitted(params, mine, given), step(params, alone, given)
        torch.testing.assert_close(found.full_tensor(), expected)
    assert 7 == mine.get_seq_length() == alone.get_seq_length()


def test_a_model_generates_with_a_static_cache() -> None:
    """The step copies the cache, which writes to its tensors; all steps after the prefill are one program."""
    config = transformers.LlamaConfig(**CONFIG)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    tokens = torch.randint(16, (5, 4), generator=torch.Generator().manual_seed(0))

    def step(past: Any, tokens: torch.Tensor) -> Any:
        past = copy.deepcopy(past)
        with torch.no_grad():
            return model(tokens, past_key_values=past).logits, past

    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    mine, alone = (transformers.StaticCache(config=config, max_cache_len=8) for _ in range(2))
    for cache in (mine, alone):
        heads = config.num_key_value_heads
        cache.early_initialization(5, heads, config.hidden_size // config.num_attention_heads, torch.float64, "cpu")
    layout = tree_map(lambda x: P("data") if x.ndim else P(), mine)
    jitted = spmd.jit(step, (layout, P("data")), (P("data"), layout), mesh=mesh)
    for given in (tokens, tokens[:, -1:], tokens[:, :1], tokens[:, 1:2]):
        (found, mine), (expected, alone) = jitted(mine, given), step(alone, given)
        torch.testing.assert_close(found.full_tensor(), expected)
    assert 2 == jitted.cache_info().misses
    assert 7 == mine.get_seq_length() == alone.get_seq_length()


@pytest.mark.parametrize("where", ["argument", "closed over"])
def test_a_static_cache_that_is_not_copied_is_refused(where: str) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)

    def step(tokens: torch.Tensor, past: Any = cache) -> Any:
        return model(tokens, past_key_values=past).logits

    tokens = torch.zeros(4, 2, dtype=torch.int64)
    args = (tokens, cache) if where == "argument" else (tokens,)
    with pytest.raises(spmd.TraceError, match=r"In-place write to .* at cache_utils.py.*copy.deepcopy\(it\) inside"):
        spmd.jit(step, mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))(*args)
