"""The reference programs by which measured rates are corrected."""

import torch
from torch.nn import functional as F

from spmd.plan.machine.reference import predicted_seconds, references


def test_the_prediction_is_a_roofline_of_each_operator_that_is_no_view() -> None:
    x = torch.ones(8, 8)
    sums = predicted_seconds(lambda: (x + x).t() + x, flops=1e9, bandwidth=1e6, latency=1.0, memory_overlap=1.0)
    assert sums == 2 * (3 * 256 / 1e6 + 1.0)
    product = predicted_seconds(lambda: x @ x, flops=2.0, bandwidth=1e9, latency=0.5, memory_overlap=1.0)
    assert product == 2 * 8**3 / 2.0 + 0.5
    product = predicted_seconds(lambda: x @ x, flops=1e9, bandwidth=2.0, latency=0.5, memory_overlap=1.0)
    assert product == 3 * 256 / 2.0 + 0.5
    product = predicted_seconds(lambda: x @ x, flops=2.0, bandwidth=3.0, latency=0.5, memory_overlap=0.25)
    assert product == 2 * 8**3 / 2.0 + 0.75 * 3 * 256 / 3.0 + 0.5
    sums = predicted_seconds(
        lambda: x + x, flops=1e9, bandwidth=1e6, latency=1.0, memory_overlap=1.0, write_allocate=True
    )
    assert sums == 4 * 256 / 1e6 + 1.0
    gelu = predicted_seconds(
        lambda: F.gelu(x, approximate="tanh"),
        flops=1.0, bandwidth=2.0, latency=0.5, memory_overlap=0.0, transcendental=3.0,
    )  # fmt: skip
    assert gelu == 64 * 3.0 + 2 * 256 / 2.0 + 0.5


def test_the_references_have_products_of_many_rows_with_other_operators_and_of_few() -> None:
    run, few_rows = references(torch.device("cpu"))
    slow_products = predicted_seconds(run, flops=1.0, bandwidth=1e30, latency=0.0, memory_overlap=1.0)
    slow_memory = predicted_seconds(run, flops=1e30, bandwidth=1.0, latency=0.0, memory_overlap=1.0)
    tokens, width = 8 * 64, 256
    assert slow_products == 2 * tokens * width**2 * (3 + 1 + 8) + 2 * 2 * tokens * 64 * width
    assert slow_memory > 20 * tokens * width * 4
    slow_products = predicted_seconds(few_rows, flops=1.0, bandwidth=1e30, latency=0.0, memory_overlap=1.0)
    slow_memory = predicted_seconds(few_rows, flops=1e30, bandwidth=1.0, latency=0.0, memory_overlap=1.0)
    assert slow_products == 12 * 3 * 2 * 64 * 512**2
    assert slow_memory == 12 * 3 * (512**2 + 2 * 64 * 512) * 4
