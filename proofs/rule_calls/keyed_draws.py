"""Small calls of the operators that draw by keys."""

from __future__ import annotations

import torch

from proofs.rule_calls.draws import Draws, call
from spmd.random.generators.draw import DERIVE_KEY, DRAW

_draws = Draws(17)
i = _draws.i

KEYED_DRAWS = {
    DRAW: [
        call(i(9, 2), [4, 5], "bits", torch.int32, "philox4x32"),
        call(i(9, 2), [3, 2, 7], "bits", torch.int16, "philox4x32"),
        call(i(9, 2), [7], "bits", torch.int64, "threefry2x32"),
        call(i(9, 2), [2, 5], "uniform", torch.float32, "threefry2x32"),
        call(i(9, 2), [1, 3, 5], "normal", torch.float32, "philox4x32"),
        call(i(9, 3, 2), [3, 4], "gumbel", torch.float64, "philox4x32"),
        call(i(9, 4, 1, 2), [4, 1, 3, 2], "exponential", torch.bfloat16, "philox4x32"),
        call(i(9, 5, 2), [5], "uniform", torch.float16, "philox4x32"),
        call(i(9, 2), [], "uniform", torch.float64, "threefry2x32"),
        call(i(9, 2), [3, 5], "mask", torch.int8, "philox4x32", None, None, -9000),
        call(i(9, 2), [3, 0], "normal", torch.float32, "philox4x32"),
    ],
    DERIVE_KEY: [
        call(i(9, 2), i(9), "philox4x32"),
        call(i(9, 1, 2), i(9, 5), "philox4x32"),
        call(i(9, 3, 2), i(9, 1), "threefry2x32"),
        call(i(9, 3, 4, 2), i(9, 3, 4), "threefry2x32"),
    ],
}
