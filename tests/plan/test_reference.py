"""The reference programs by which measured rates are corrected."""

import torch
from torch.nn import functional as F

from spmd.plan.machine.reference import predicted_seconds, references
from spmd.plan.machine.roofline import Roofline


def test_the_prediction_is_a_roofline_of_each_operator_that_is_no_view() -> None:
    x = torch.ones(8, 8)
    sums = predicted_seconds(lambda: (x + x).t() + x, Roofline(1e9, 1e6), 1.0)
    assert sums == 2 * (3 * 256 / 1e6 + 1.0)
    assert 4 * 256 / 1e6 == predicted_seconds(lambda: x + x, Roofline(1e9, 1e6, write_allocate=True), 0.0)
    assert 2 * 8**3 / 2.0 + 0.5 == predicted_seconds(lambda: x @ x, Roofline(2.0, 1e9), 0.5)
    assert 3 * 256 / 2.0 + 0.5 == predicted_seconds(lambda: x @ x, Roofline(1e9, 2.0), 0.5)
    product = predicted_seconds(lambda: x @ x, Roofline(2.0, 3.0, memory_overlap=0.25), 0.5)
    assert product == 2 * 8**3 / 2.0 + 0.75 * 3 * 256 / 3.0 + 0.5
    slow_tanh = Roofline(1.0, 2.0, transcendental_seconds=3.0, memory_overlap=0.0)
    gelu = predicted_seconds(lambda: F.gelu(x, approximate="tanh"), slow_tanh, 0.5)
    assert gelu == 64 * 3.0 + 2 * 256 / 2.0 + 0.5


def test_the_references_have_products_of_many_rows_with_other_operators_and_of_few() -> None:
    slow_products, slow_memory = Roofline(1.0, 1e30), Roofline(1e30, 1.0)
    run, few_rows = references(torch.device("cpu"))
    tokens, width = 8 * 64, 256
    arithmetic = 2 * tokens * width**2 * (3 + 1 + 8) + 2 * 2 * tokens * 64 * width
    assert arithmetic == predicted_seconds(run, slow_products, 0.0)
    assert predicted_seconds(run, slow_memory, 0.0) > 20 * tokens * width * 4
    assert 12 * 3 * 2 * 64 * 512**2 == predicted_seconds(few_rows, slow_products, 0.0)
    assert 12 * 3 * (512**2 + 2 * 64 * 512) * 4 == predicted_seconds(few_rows, slow_memory, 0.0)


def test_the_references_draw_nothing_from_the_generator_of_programs() -> None:
    state = torch.get_rng_state()
    for run in references(torch.device("cpu")):
        run()
    assert torch.equal(state, torch.get_rng_state())
