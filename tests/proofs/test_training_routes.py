"""Stock models trained by three routes give the numbers of one device."""

from __future__ import annotations

import pytest

from proofs.models.cases import MODELS, Model
from proofs.models.routes import LAYOUTS, train

pytest.importorskip("transformers")
FAST = ("llama", "bert")
SLOW = pytest.mark.slow  # some seconds of planning each; `make test-models` has all models, also of other packages
SAMPLE = [
    pytest.param(model, id=model.name, marks=() if model.name in FAST else SLOW)
    for model in MODELS
    if model.trains and model.name in (*FAST, "t5", "resnet (transformers)", "mamba", "mixtral", "whisper", "nn.LSTM")
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", SAMPLE)
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_three_routes_give_the_numbers_of_one_device(model: Model, layout: str) -> None:
    assert [trial for trial in train(model, layout) if not trial.passes] == []
