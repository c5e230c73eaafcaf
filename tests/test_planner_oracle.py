"""The planner's exact search against an integer program solved by HiGHS."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

import spmd
from spmd import P
from spmd.plan import problem as planning
from spmd.plan.elimination import Solution, Table, minimize


def solve_by_highs(domains: Sequence[int], tables: Sequence[Table]) -> float:
    """The least cost of an assignment: one-hot variables for choices, and for the pairs of choices of every table."""
    offsets = np.concatenate([[0], np.cumsum(domains)])
    count = int(offsets[-1])
    costs = np.zeros(count)
    upper = np.ones(count)
    rows: list[tuple[int, int, float]] = [
        (v, int(offsets[v]) + c, 1.0) for v, n in enumerate(domains) for c in range(n)
    ]
    sums = [1.0] * len(domains)
    pair_costs: list[float] = []
    pair_upper: list[float] = []
    for table in tables:
        if len(table.variables) == 1:
            start = int(offsets[table.variables[0]])
            for choice, cost in enumerate(table.costs.tolist()):
                if cost == float("inf"):
                    upper[start + choice] = 0.0
                else:
                    costs[start + choice] += cost
            continue
        first, second = table.variables
        base = count + len(pair_costs)
        width = domains[second]
        for cost in table.costs.flatten().tolist():
            pair_costs.append(0.0 if cost == float("inf") else cost)
            pair_upper.append(0.0 if cost == float("inf") else 1.0)
        for a in range(domains[first]):  # the pairs with a choice add up to the choice
            rows += [(len(sums), base + a * width + b, 1.0) for b in range(width)]
            rows.append((len(sums), int(offsets[first]) + a, -1.0))
            sums.append(0.0)
        for b in range(width):
            rows += [(len(sums), base + a * width + b, 1.0) for a in range(domains[first])]
            rows.append((len(sums), int(offsets[second]) + b, -1.0))
            sums.append(0.0)
    total = count + len(pair_costs)
    index = np.array([(row, column) for row, column, _ in rows])
    matrix = coo_array(([value for *_, value in rows], (index[:, 0], index[:, 1])), shape=(len(sums), total))
    found = milp(
        1e6 * np.concatenate([costs, pair_costs]),  # seconds are too small for the solver's tolerances
        integrality=np.concatenate([np.ones(count), np.zeros(len(pair_costs))]),
        bounds=Bounds(0.0, np.concatenate([upper, pair_upper])),
        constraints=LinearConstraint(matrix.tocsr(), sums, sums),
        options={"mip_rel_gap": 1e-9},
    )
    assert found.success, found.message
    return float(found.fun) / 1e6


def gpt_step(params: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        x = F.embedding(tokens, params["tokens"])
        batch, length, width = x.shape
        q, k, v = (F.linear(x, params[n]).view(batch, length, 4, width // 4).transpose(1, 2) for n in ("q", "k", "v"))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
        x = x + F.linear(mixed.transpose(1, 2).reshape(x.shape), params["o"])
        x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,)), params["up"])), params["down"])
        return F.cross_entropy(F.linear(x, params["tokens"]).view(batch * length, -1), tokens.view(-1))

    grads = torch.func.grad(loss)(params)
    return {name: params[name] - 0.1 * grads[name] for name in params}


SHAPES = {
    "tokens": (64, 32),
    "q": (32, 32),
    "k": (32, 32),
    "v": (32, 32),
    "o": (32, 32),
    "up": (128, 32),
    "down": (32, 128),
}
TENSOR_PARALLEL = {
    "tokens": P("x"), "q": P("x"), "k": P("x"), "v": P("x"), "o": P(None, "x"), "up": P("x"), "down": P(None, "x"),
}  # fmt: skip


@pytest.mark.parametrize("scale", [1, 64])
@pytest.mark.parametrize("specs", [P(), P("x"), TENSOR_PARALLEL], ids=["dp", "fsdp", "tp"])
def test_one_axis_is_planned_as_well_as_an_integer_program_says(
    monkeypatch: pytest.MonkeyPatch, specs: object, scale: int
) -> None:
    """Small sizes make latency count, large ones bytes."""
    solved: list[tuple[float, float]] = []

    def compare(domains: Sequence[int], tables: Sequence[Table]) -> Solution:
        found = minimize(domains, tables)
        solved.append((solve_by_highs(domains, tables), found.cost))
        return found

    monkeypatch.setattr(planning, "minimize", compare)
    params = {name: spmd.TensorMeta((a * scale, b * scale), torch.float32) for name, (a, b) in SHAPES.items()}
    tokens = spmd.TensorMeta((8, 16), torch.int64)
    mesh = spmd.make_mesh({"x": 4}, runtime="abstract")
    spmd.jit(gpt_step, (specs, P() if specs is TENSOR_PARALLEL else P("x")), specs, mesh=mesh).plan(params, tokens)
    ((expected, actual),) = solved
    assert actual == pytest.approx(expected, rel=1e-6)
