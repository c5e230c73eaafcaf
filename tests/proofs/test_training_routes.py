"""Stock models trained by three routes give the numbers of one device."""

from __future__ import annotations

import pytest

from proofs.models.cases import MODELS, Model
from proofs.models.routes import LAYOUTS, train

pytest.importorskip("transformers")
FAST = ("llama", "bert")
SLOW = pytest.mark.slow  # some seconds of planning each; `make test-models` has all models, also of other packages
NAMES = (*FAST, "t5", "resnet (transformers)", "mamba", "mixtral", "whisper", "nn.LSTM")
SAMPLE = sorted(
    (model for model in MODELS if model.trains and model.name in NAMES), key=lambda model: NAMES.index(model.name)
)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, id=f"{model.name}-{layout}", marks=() if (n, m) in ((0, 0), (1, 1)) else SLOW)
        for n, model in enumerate(SAMPLE)
        for m, layout in enumerate(LAYOUTS)
    ],
)
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_three_routes_give_the_numbers_of_one_device(model: Model, layout: str) -> None:
    assert [trial for trial in train(model, layout) if not trial.passes] == []
