"""Functions under jit whose samples have lengths: F.ctc_loss, and packed sequences in recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampling import product, sample
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import spmd
from spmd import P, TensorMeta, TraceError
from spmd.core.pytree import tree_leaves

MESHES = [{"data": 2}, {"data": 3}, {"data": 8}, {"data": 2, "model": 2}]
"""Uneven, with empty shards, and of two axes, for five samples."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def full(tree: Any) -> list[torch.Tensor]:
    return [leaf.full_tensor() for leaf in tree_leaves(tree)]


TARGETS = torch.tensor([[1, 2, 3], [3, 3, 0], [2, 0, 0], [0, 0, 0], [3, 2, 3]])
INPUT_LENGTHS, TARGET_LENGTHS = (7, 6, 7, 5, 2), (3, 2, 1, 0, 3)
BEHIND_EACH_OTHER = torch.cat([row[:length] for row, length in zip(TARGETS, TARGET_LENGTHS, strict=True)])


def ctc(targets: torch.Tensor, **options: Any) -> Callable[..., Any]:
    def step(x: torch.Tensor, lengths: Any) -> Any:
        weights = torch.arange(1.0, 6.0, dtype=torch.float64)

        def loss(x: torch.Tensor) -> torch.Tensor:
            found = F.ctc_loss(x.log_softmax(-1), targets, *lengths, zero_infinity=True, **options)
            return (found * weights).sum() if found.ndim else found

        return torch.func.grad_and_value(loss)(x)

    return step


LAYOUTS_OF_TARGETS = {"rows": TARGETS, "behind each other": BEHIND_EACH_OTHER}


@pytest.mark.parametrize(
    ("axes", "kind", "layout", "reduction"),
    product(MESHES, ["static", "tensors"], LAYOUTS_OF_TARGETS, ["none", "mean", "sum"]),
)
def test_ctc_loss(axes: dict[str, int], kind: str, layout: str, reduction: str) -> None:
    """The last sample is too short for its target: its loss is infinite, which zero_infinity makes zero."""
    step = ctc(LAYOUTS_OF_TARGETS[layout], reduction=reduction)
    lengths: Any = INPUT_LENGTHS, TARGET_LENGTHS
    expected = step(randn(7, 5, 4), tuple(map(torch.tensor, lengths)))
    in_specs = (P(None, "data"),) if kind == "static" else (P(None, "data"), P("data"))
    if kind == "tensors":
        lengths = tuple(map(torch.tensor, lengths))
    options = {"static_argnums": [1]} if kind == "static" else {}
    jitted = spmd.jit(step, in_specs, mesh=spmd.make_mesh(axes, runtime="virtual"), **options)
    torch.testing.assert_close(full(jitted(randn(7, 5, 4), lengths)), list(expected))


def test_ctc_loss_sends_only_its_sum() -> None:
    mesh = spmd.make_mesh({"data": 8}, runtime="abstract")
    metas = TensorMeta((100, 64, 32), torch.float32), TensorMeta((64, 20), torch.int64)

    def step(x: torch.Tensor, targets: torch.Tensor) -> Any:
        lengths = [100] * 64, [20] * 64
        return torch.func.grad_and_value(lambda x: F.ctc_loss(x.log_softmax(-1), targets, *lengths))(x)

    plan = spmd.jit(step, (P(None, "data"), P("data")), (P(None, "data"), P()), mesh=mesh).plan(*metas)
    assert ["all_reduce"] == [collective.kind for collective in plan.comms]


def test_ctc_loss_of_a_module_of_one_sample_and_of_batches_of_gradients() -> None:
    loss = torch.nn.CTCLoss(blank=3, reduction="sum")
    x, targets = randn(5, 7, 4), torch.tensor([0, 1, 1])
    one = lambda x: loss(x.log_softmax(-1), targets, (7,), (3,))  # noqa: E731
    each = spmd.jit(torch.func.vmap(torch.func.grad(one)), P("data"), mesh=spmd.make_mesh({"data": 2}))
    expected = torch.stack([torch.func.grad(one)(sample) for sample in x])
    torch.testing.assert_close(each(x).full_tensor(), expected)


def test_lengths_that_do_not_fit() -> None:
    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    x = randn(7, 5, 4)
    with pytest.raises(TraceError, match=r"target_lengths of ctc_loss at .*:\d+ .*5 lengths of 0 to 3 \(got \[4, 2"):
        spmd.jit(ctc(TARGETS), mesh=mesh, static_argnums=[1])(x, (INPUT_LENGTHS, (4, 2, 1, 0, 3)))
    pack = lambda x, lengths: pack_padded_sequence(x, lengths).data  # noqa: E731
    with pytest.raises(TraceError, match=r"longest first \(got \[2, 3, 1, 1, 1\]\). Pass enforce_sorted=False"):
        spmd.jit(pack, mesh=mesh, static_argnums=[1])(x, (2, 3, 1, 1, 1))
    with pytest.raises(TraceError, match=r"needs 5 lengths of at most 7 \(got \[8, 3, 1, 1, 1\]\)"):
        spmd.jit(pack, mesh=mesh, static_argnums=[1])(x, (8, 3, 1, 1, 1))
    with pytest.raises(TraceError, match=r"needs the values of lengths, .*Pass the lengths as a static argument"):
        spmd.jit(pack, mesh=mesh)(x, torch.tensor([7, 3, 1, 1, 1]))


LAYERS: dict[str, Callable[..., torch.nn.RNNBase]] = {
    "lstm": lambda **options: torch.nn.LSTM(3, 4, 2, **options),
    "projected": lambda **options: torch.nn.LSTM(3, 4, 2, proj_size=2, **options),
    "gru": lambda **options: torch.nn.GRU(3, 4, 2, **options),
    "rnn": lambda **options: torch.nn.RNN(3, 4, 2, bias=False, **options),
    "relu": lambda **options: torch.nn.RNN(3, 4, 1, nonlinearity="relu", **options),
}


def recurrent(net: torch.nn.RNNBase, with_states: bool, **packing: Any) -> Callable[..., Any]:
    """Gradients and results of a recurrent layer on packed sequences; torch.func has none on one device."""

    def step(params: Any, x: torch.Tensor, h: torch.Tensor, lengths: Any) -> Any:
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        x, h = x.detach().requires_grad_(), h.detach().requires_grad_()
        states = (h, h.new_ones(h.shape[0], h.shape[1], 4) * h.mean()) if net.mode == "LSTM" else h
        packed = pack_padded_sequence(x, lengths, batch_first=net.batch_first, **packing)
        output, final = torch.func.functional_call(net, leaves, (packed, states if with_states else None))
        padded, found = pad_packed_sequence(output, net.batch_first, padding_value=2.0, total_length=6)
        loss = padded.sin().sum() + sum((state * state).sum() for state in tree_leaves(final))
        reads = [*leaves.values(), x, *([h] if with_states else [])]
        return torch.autograd.grad(loss, reads), padded.detach(), found, [x.detach() for x in tree_leaves(final)]

    return step


def check_recurrent(name: str, axes: dict[str, int], lengths: tuple[int, ...], **options: Any) -> None:
    both, first, states, dropout, packing = (
        options.get(key, default)
        for key, default in (("both", False), ("first", False), ("states", False), ("dropout", 0.0), ("packing", {}))
    )
    net = LAYERS[name](bidirectional=both, batch_first=first, dropout=dropout, dtype=torch.float64)
    params = {key: randn(*value.shape, seed=n) / 2 for n, (key, value) in enumerate(net.named_parameters())}
    count = len(lengths)
    x = randn(count, 6, 3) if first else randn(6, count, 3)
    h = randn(net.num_layers * (1 + both), count, net.proj_size or 4, seed=9)
    step, batch = recurrent(net, states, **packing), P("data") if first else P(None, "data")
    torch.manual_seed(0)
    expected = step(params, x, h, lengths)
    mesh = spmd.make_mesh(axes, runtime="virtual")
    jitted = spmd.jit(step, (P(), batch, P(None, "data")), mesh=mesh, static_argnums=[3])
    torch.manual_seed(0)
    torch.testing.assert_close(full(jitted(params, x, h, lengths)), tree_leaves(expected))


UNSORTED = {"enforce_sorted": False}


@pytest.mark.parametrize("axes", sample(MESHES, [{"data": 3}, {"data": 2, "model": 2}]))
def test_packed_sequences_on_meshes(axes: dict[str, int]) -> None:
    check_recurrent("lstm", axes, (2, 6, 1, 3, 3), states=True, packing=UNSORTED)


@pytest.mark.parametrize(("name", "states", "both"), product(LAYERS, [False, True], [False, True]))
def test_packed_sequences(name: str, states: bool, both: bool) -> None:
    check_recurrent(name, {"data": 2}, (2, 5, 1), both=both, states=states, first=states, packing=UNSORTED)


@pytest.mark.parametrize("lengths", [(5, 3, 1), (6, 6, 6)], ids=str)
def test_packed_sequences_that_are_sorted(lengths: tuple[int, ...]) -> None:
    check_recurrent("gru", {"data": 2}, lengths, states=True)


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
def test_dropout_between_layers_draws_what_one_device_draws() -> None:
    check_recurrent("lstm", {"data": 2}, (2, 5, 1), dropout=0.5, both=True, packing=UNSORTED)


def test_packed_data_that_a_function_changes() -> None:
    net = torch.nn.GRU(3, 4, dtype=torch.float64).requires_grad_(False)

    def step(x: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, [2, 5, 1], enforce_sorted=False)
        output, last = net(packed._replace(data=packed.data.tanh()))
        assert isinstance(output, PackedSequence)
        sequences = pack_sequence([x[:4, 0], x[:2, 1]])
        return output.data * 2, output.batch_sizes, last, net(sequences)[1]

    jitted = spmd.jit(step, P(None, "data"), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))
    torch.testing.assert_close(full(jitted(randn(5, 3, 3))), list(step(randn(5, 3, 3))))


def test_what_is_behind_the_end_of_a_sample_is_never_read() -> None:
    net = torch.nn.RNN(3, 4, dtype=torch.float64)
    params = {name: value.detach() for name, value in net.named_parameters()}
    step = recurrent(net, False)
    clean, x = randn(6, 2, 3), randn(6, 2, 3)
    x[2:, 1] = torch.nan
    h = randn(1, 2, 4)
    jitted = spmd.jit(step, mesh=spmd.make_mesh({"data": 2}, runtime="virtual"), static_argnums=[3])
    torch.testing.assert_close(full(jitted(params, x, h, (6, 2))), tree_leaves(step(params, clean, h, (6, 2))))


def test_packed_sequences_send_only_gradients_of_weights() -> None:
    net = torch.nn.LSTM(256, 256)

    def step(params: Any, x: torch.Tensor) -> Any:
        def loss(params: Any) -> torch.Tensor:
            packed = pack_padded_sequence(x, list(range(1, 4)) * 1024 + [4] * 1024, enforce_sorted=False)
            output, _ = torch.func.functional_call(net, params, (packed,))
            return pad_packed_sequence(output)[0].square().mean()

        return torch.func.grad(loss)(params)

    metas = {name: TensorMeta(tuple(value.shape), value.dtype) for name, value in net.named_parameters()}
    mesh = spmd.make_mesh({"data": 8}, runtime="abstract")
    x = TensorMeta((4, 4096, 256), torch.float32)
    plan = spmd.jit(step, (P(), P(None, "data")), P(), mesh=mesh).plan(metas, x)
    assert {"all_reduce"} == {collective.kind for collective in plan.comms}


def test_numbers_that_follow_from_the_program_have_values() -> None:
    offsets = torch.tensor([1, 2])

    def step(x: torch.Tensor) -> torch.Tensor:
        last = torch.arange(4).flip(0)[0]
        return x[: int(last)] * (offsets.sum().item() if last > 2 else 0)

    jitted = spmd.jit(step, P("data"), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))
    torch.testing.assert_close(jitted(randn(5, 2)).full_tensor(), randn(5, 2)[:3] * 3)
    offsets.add_(1)
    torch.testing.assert_close(jitted(randn(5, 2)).full_tensor(), randn(5, 2)[:3] * 5)
    random = spmd.jit(lambda x: x * torch.rand(()).item(), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))
    with pytest.raises(TraceError, match=r"\.item\(\) at .* needs the values of tensor"):
        random(randn(2))
