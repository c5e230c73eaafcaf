"""Plain tensors beside DTensors outside of `spmd.jit`: those that torch makes, and the user's, which are refused."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import plain_cases as cases
import pytest
import torch
import torch.nn.functional as F
from sampling import product, sample
from torch import nn
from workers import Workers, call_on_mesh

import spmd
from spmd import P
from spmd.errors import ShardingError

MESH = spmd.make_mesh({"x": 3}, runtime="virtual")
MASK, WEIGHT = torch.ones(6, 6).tril().bool(), torch.ones(4, 8)


PLACES = [({"x": 3}, 0), ({"x": 2, "y": 2}, -1)]
LONG = ("GRU of packed sequences", "RNN of packed sequences")
"""What these do is done by the LSTM of packed sequences, too."""


@pytest.mark.parametrize(
    ("name", "at"),
    [
        *product([name for name in cases.CASES if name not in LONG], PLACES),
        *(pytest.param(name, at, marks=pytest.mark.slow) for name, at in itertools.product(LONG, PLACES)),
    ],
)
def test_tensors_that_torch_makes(name: str, at: tuple[dict[str, int], int]) -> None:
    axes, shard = at
    found = cases.results(name, spmd.make_mesh(axes, runtime="virtual"), shard)
    torch.testing.assert_close(found, cases.results(name, None))


ON_PROCESSES = ["causal attention with dropout", "fractional pooling", "chunks of a loss"]
SLOW_ON_PROCESSES = [
    "LSTM",
    "LSTM of packed sequences",
    "padded sequences",
    "normalization over channels",
    "eigenvalues",
]


@pytest.mark.parametrize("name", sample([*ON_PROCESSES, *SLOW_ON_PROCESSES], ON_PROCESSES))
def test_tensors_that_torch_makes_on_processes(name: str, workers: Workers) -> None:
    expected = cases.results(name, None)
    for found in workers.run(call_on_mesh, functools.partial(cases.results, name), {"x": 2}, "distributed", ranks=2):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("check", "refused"), [("first", [0, 0, 0, 1]), ("calls", [0, 0, 1, 1])])
def test_ranks_compare_what_torch_draws(check: str, refused: list[int], workers: Workers) -> None:
    for said in workers.run(call_on_mesh, cases.drawn_apart, {"x": 2}, "distributed", check, ranks=2):
        assert refused == [bool(text) for text in said]
        assert "A plain tensor that torch made for aten.add.Tensor at plain_cases.py:" in said[-1]
        assert said[-1].endswith("If it is drawn, call torch.manual_seed with the same seed on all ranks.")


@pytest.mark.parametrize("name", sample(["LSTM", "eigenvalues"], ["LSTM"]))
def test_ranks_compare_a_tensor_that_torch_makes_once(name: str, workers: Workers) -> None:
    run = functools.partial(cases.comparisons, name)
    for calls in workers.run(call_on_mesh, run, {"x": 2}, "distributed", ranks=2):
        assert calls and not [call for call in calls if "with plain tensors" in call]


def test_gradients_of_what_is_written_to_a_plain_tensor_are_dtensors() -> None:
    x = spmd.distribute(torch.arange(1.0, 7.0), P("x"), MESH).requires_grad_()
    cases._total(x).backward()
    assert isinstance(x.grad, spmd.DTensor) and x.spec == x.grad.spec


@pytest.mark.parametrize("write", [
    lambda plain, x: plain.copy_(x),
    lambda plain, x: torch.mul(x, 2, out=plain),
    lambda plain, x: plain.__setitem__(0, x[0]),
    lambda plain, x: plain.__iadd__(x),
    lambda plain, x: nn.init.zeros_(plain).add_(x),
])  # fmt: skip
def test_writes_to_plain_tensors_of_the_user_are_refused(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    plain, x = torch.ones(6, 4), spmd.distribute(torch.rand(6, 4), P("x"), MESH)
    with pytest.raises(ShardingError, match=r"writes values of a DTensor to a plain tensor f32"):
        write(plain, x)
    assert plain.unique().numel() == 1


def test_padded_sequences_stay_sharded() -> None:
    parts = [spmd.distribute(torch.rand(n, 6), P(None, "x"), MESH) for n in (5, 3)]
    with spmd.comms_of() as sent:
        padded = nn.utils.rnn.pad_sequence(parts)
    assert padded.spec.pspec == P(None, None, "x") and not sent.comms


def test_lengths_of_packed_sequences_may_be_dtensors() -> None:
    x, lengths = torch.rand(5, 6, 4), torch.tensor([6, 4, 4, 1, 1])
    packed = nn.utils.rnn.pack_padded_sequence(
        spmd.distribute(x, P("x"), MESH), spmd.distribute(lengths, P("x"), MESH), batch_first=True
    )
    expected = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    assert torch.equal(expected.data, packed.data.full_tensor())
    assert torch.equal(expected.batch_sizes, packed.batch_sizes)


def test_errors_of_packed_sequences_are_those_of_torch() -> None:
    rnn, x = nn.utils.rnn, spmd.distribute(torch.rand(5, 6, 4), P("x"), MESH)
    with pytest.raises(RuntimeError, match="must be sorted in decreasing order"):
        rnn.pack_padded_sequence(x, [1, 6, 4, 4, 1], batch_first=True)
    with pytest.raises(RuntimeError, match="to be equal to batch_size"):
        rnn.pack_padded_sequence(x, [6, 4], batch_first=True)
    with pytest.raises(RuntimeError, match="Expected padding_side to be one of left or right"):
        rnn.pad_sequence([x], padding_side="top")


@pytest.mark.parametrize("value", [torch.tensor([2, 5]), torch.tensor(3)], ids=["places", "count"])
def test_splits_where_a_dtensor_says(value: torch.Tensor) -> None:
    x, places = torch.rand(7, 4), spmd.distribute(value, P(), MESH)
    expected = torch.tensor_split(x, value)
    for found in (torch.tensor_split(spmd.distribute(x, P("x"), MESH), places), torch.tensor_split(x, places)):
        torch.testing.assert_close(list(expected), [getattr(part, "full_tensor", part.clone)() for part in found])


def test_arrays_are_compared() -> None:
    held, array = torch.arange(12.0).view(4, 3), np.arange(3.0)
    x, holder = spmd.distribute(held, P("x"), MESH), {"array": array}
    expected = held == torch.from_numpy(array)
    for found in (
        x == array,
        array == x,
        x == holder["array"],
        x == np.arange(3.0),
        x == array.copy(),
        x == -(0 - array),
    ):
        assert torch.equal(expected, found.full_tensor())
    with pytest.raises(ShardingError, match="has a plain tensor"):
        x == torch.from_numpy(array)  # noqa: B015


def test_meta_tensors_are_refused() -> None:
    x, meta = spmd.distribute(torch.rand(4, 3), P("x"), MESH), torch.ones(3, device="meta")
    with spmd.implicit_replication():
        for call in (lambda: x + meta, lambda: torch.stack([x, x.to("meta")]), lambda: x.clone().copy_(meta)):
            with pytest.raises(ShardingError, match=r"An operand of aten.* at test_plain.* \(got a meta tensor"):
                call()
    assert x.to("meta").is_meta and torch.empty_like(x, device="meta").copy_(x).is_meta


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_refused() -> None:
    x, plain = spmd.distribute(torch.rand(4, 3), P("x"), MESH), torch.rand(4, 3)
    quantized = torch.quantize_per_tensor(plain, 0.1, 0, torch.quint8)
    calls = [
        lambda: x + quantized,
        lambda: x.copy_(quantized),
        lambda: spmd.distribute(quantized, P("x"), MESH),
        lambda: spmd.DTensor.from_local([quantized] * 3, MESH, P("x")),
        lambda: spmd.jit(lambda x: x + 1, P("x"), mesh=MESH)(quantized),
    ]
    for call in calls:
        with pytest.raises(ShardingError, match="is quantized, "):
            call()
    with pytest.raises(ShardingError, match=r"makes a quantized tensor of a DTensor.*fake_quantize_per_tensor_affine"):
        torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


class Holder(nn.Module):
    """An attention whose mask is an attribute, a buffer, or the result of a method."""

    masks: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.mask = how, MASK
        self.register_buffer("masks", MASK[None])

    def make(self, x: torch.Tensor) -> torch.Tensor:
        return MASK[: x.shape[-2]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "attribute":
            return attend(x, x, x, self.mask, dropout_p=0.5)
        if self.how == "buffer":
            return attend(x, x, x, attn_mask=self.masks[0], dropout_p=0.5)
        return attend(x, x, x, self.make(x), dropout_p=0.5)


attend = F.scaled_dot_product_attention


def _placed(module: nn.Module) -> nn.Module:
    return spmd.distribute_module(module, MESH)


def _closure(x: torch.Tensor) -> Any:
    mask = MASK.clone()

    def run() -> torch.Tensor:
        return attend(x, x, x, mask, dropout_p=0.5)

    return run()


def _container(x: torch.Tensor) -> Any:
    held = {"masks": [MASK.clone()]}
    return attend(x, x, x, held["masks"][0], dropout_p=0.5)


def _starred(x: torch.Tensor) -> Any:
    given = {"attn_mask": MASK.clone()}
    return attend(x, x, x, **given, dropout_p=0.5)


def _attention(x: torch.Tensor, **given: Any) -> Any:
    return _placed(nn.MultiheadAttention(8, 2, dropout=0.5))(x[0], x[0], x[0], **given)


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a sum": lambda x: x + torch.ones(8),
    "a linear layer": lambda x: nn.Linear(8, 4)(x),
    "a linear layer among others": lambda x: nn.Sequential(_placed(nn.Linear(8, 8)), nn.Linear(8, 4))(x),
    "a bias": lambda x: torch.func.functional_call(
        nn.Linear(8, 4), {"weight": spmd.distribute(WEIGHT, P(), MESH), "bias": torch.zeros(4)}, (x,)
    ),
    "a weight": lambda x: F.linear(x, WEIGHT),
    "a weight that has no name": lambda x: F.linear(x, torch.ones(4, 8)),
    "a weight in a partial function": lambda x: functools.partial(F.linear, weight=WEIGHT)(x),
    "a weight under vmap": lambda x: torch.vmap(lambda row: F.linear(row, WEIGHT))(x),
    "a mask of the module": lambda x: attend(x, x, x, MASK, dropout_p=0.5),
    "a mask that has no name": lambda x: attend(x, x, x, torch.ones(6, 6), dropout_p=0.5),
    "a mask of a call": lambda x: attend(x, x, x, Holder("call").make(x), dropout_p=0.5),
    "a mask in a closure": _closure,
    "a mask in a container": _container,
    "a mask in keyword arguments": _starred,
    "masks of a generator": lambda x: sum(attend(x, x, x, mask, dropout_p=0.5) for mask in [MASK]),
    "a mask in an attribute": lambda x: Holder("attribute")(x),
    "a mask in a buffer": lambda x: Holder("buffer")(x),
    "a mask of a method": lambda x: Holder("method")(x),
    "a mask of an attention": lambda x: _attention(x, attn_mask=torch.ones(2, 2, dtype=torch.bool)),
    "a padding mask of an attention": lambda x: _attention(x, key_padding_mask=torch.zeros(6, 2, dtype=torch.bool)),
    "a state": lambda x: _placed(nn.GRU(8, 5))(x[0], torch.zeros(1, 6, 5)),
    "states": lambda x: _placed(nn.LSTM(8, 5))(x[0], (torch.zeros(1, 6, 5), torch.zeros(1, 6, 5))),
    "a target": lambda x: F.mse_loss(x, torch.zeros(4, 2, 6, 8)),
    "a condition": lambda x: torch.where(torch.ones(8).bool(), x, 0.0),
    "a product": lambda x: torch.einsum("abcd,de->abce", x, torch.ones(8, 4)),
    "a mean of a distribution": lambda x: torch.distributions.Normal(torch.arange(8.0), 1.0).log_prob(x),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("autocast", [False, True])
def test_tensors_of_the_user_are_refused(name: str, autocast: bool) -> None:
    x = spmd.distribute(torch.ones(4, 2, 6, 8), P("x"), MESH)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        pytest.raises(ShardingError, match=r"has a plain tensor .* Place it with spmd.distribute\(x, spec, mesh\)"),
    ):
        REFUSED[name](x)


def test_a_call_in_a_call_gets_a_name() -> None:
    labels = lambda: spmd.distribute(torch.arange(4), P("x"), MESH)  # noqa: E731
    with pytest.raises(ShardingError, match=r"If `labels\(\)` is a DTensor, and torch made the plain one, give it a n"):
        F.one_hot(labels(), 4)
    placed = labels()
    assert torch.equal(torch.eye(4).long(), F.one_hot(placed, 4).full_tensor())


def test_numbers_of_a_distribution() -> None:
    for make in (torch.distributions.Binomial, torch.distributions.NegativeBinomial, torch.distributions.Multinomial):
        plain = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]])
        found = make(5, spmd.distribute(plain, P("x"), MESH))
        torch.manual_seed(0)
        sample = found.sample((4,))
        torch.manual_seed(0)
        expected = make(5, plain)
        assert torch.equal(expected.sample((4,)), sample.full_tensor())
        torch.testing.assert_close(expected.log_prob(sample.full_tensor()), found.log_prob(sample).full_tensor())


@pytest.mark.parametrize("module", [nn.Embedding(9, 6, sparse=True), nn.EmbeddingBag(9, 6, mode="sum", sparse=True)])
def test_sparse_gradients_are_refused(module: nn.Module) -> None:
    indices = spmd.distribute(torch.arange(6).view(3, 2), P("x"), MESH)
    with pytest.raises(ShardingError, match=r"makes a tensor of layout torch.sparse_coo .* dense with sparse=False"):
        spmd.distribute_module(copy.deepcopy(module), MESH)(indices).sum().backward()


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc])
def test_tensors_that_become_sparse_are_refused(convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(ShardingError, match=r"x.full_tensor\(\).to_sparse\(\)"):
        convert(spmd.distribute(torch.eye(4), P("x"), MESH))
