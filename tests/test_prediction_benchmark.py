"""The benchmark of predicted times plans, times and compares what it says."""

import math

import pytest

import gpt
import predictions
from predictions import Prediction

SMALL = gpt.Config(vocab=16, width=16, heads=2, layers=1, context=8)


@pytest.mark.slow  # it times steps on two processes for 15 seconds
def test_variants_are_planned_and_timed(workers):
    names = ["fsdp", "fsdp, never gathered", "fsdp for an H100"]
    found, _ = workers.run(predictions.measure, names, SMALL, 4, 2, ranks=2)
    assert names == [row.variant for row in found]
    assert all(row.error == "" and row.predicted > 0 and row.measured > 0 for row in found)
    assert found[0].predicted == pytest.approx(found[2].predicted)  # workers have the default machine
    assert found[1].sent != found[0].sent


def test_groups_have_a_correlation_and_an_error():
    times = {"a": (1.0, 2.0), "b": (3.0, 3.0), "c": (4.0, 5.0)}
    found = [Prediction(name, 128, 8, *pair, "m", 7, 2e6) for name, pair in times.items()]
    failed = Prediction("d", 128, 8, math.nan, math.nan, "m", error="no plan")
    assert [(128, 8, 3, pytest.approx(1.0), pytest.approx(0.2))] == list(predictions.groups([*found, failed]))
    *_, last = predictions.rows([*found, failed])
    assert ("128", "8", "d", "no plan", "", "", "", "") == last
    assert ("128", "8", "a", "1000.0", "2000.0", "0.50", "7", "2.00") == next(predictions.rows(found))
    assert "| 128 | 8 | 3 | 1.00 | 20% |" in predictions.markdown(found, "about")
