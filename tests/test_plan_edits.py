"""Saved plans that somebody has edited: each is refused by an error of ours, or computes what the program computes."""

import collections
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from document_edits import edit

import spmd
from spmd import P
from spmd.plan import Plan
from spmd.plan.saving import restore
from spmd.tree import tree_leaves


@attrs.frozen
class Program:
    """A function, its arguments, and how it is jitted."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    in_specs: Any
    out_specs: Any
    axes: dict[str, int]
    options: dict[str, Any] = attrs.field(factory=dict)
    plain: Callable[..., Any] | None = None

    def jitted(self, **options: Any) -> Any:
        mesh = spmd.make_mesh(self.axes, runtime="virtual")
        return spmd.jit(self.function, self.in_specs, self.out_specs, mesh=mesh, **{**self.options, **options})

    def run(self, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [leaf.full_tensor() for leaf in tree_leaves(self.jitted(**options)(*self.args))]

    def expected(self) -> list[torch.Tensor]:
        torch.manual_seed(3)
        return tree_leaves((self.plain or self.function)(*self.args))


def train(weights: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    """A step of gradient descent."""

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(torch.relu(x @ weights["up"]) @ weights["down"], x.argmax(-1))

    grads, value = torch.func.grad_and_value(loss)(weights)
    return {name: weights[name] - grads[name] for name in weights}, value


def heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Dims of several atoms: batch and sequence in one, heads and widths in another."""
    q = F.linear(x, w).view(4, 6, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(4, 6, 8).sum(-1)


def vocabulary(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A lookup, and logits, over a vocabulary that may be sharded: strategies with local implementations."""
    h = F.embedding(tokens, table)
    return F.cross_entropy((h @ table.t()).flatten(0, 1), tokens.flatten())


def uneven(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two arguments of one shape, and reductions of three kinds."""
    z = torch.softmax(x - y, -1) * y
    return z.amax(0) + z.sum(0), torch.minimum(x, y).amin(1)


def constrained(x: torch.Tensor) -> torch.Tensor:
    y = spmd.constrain((x + 1).reshape(24), P(("b", "a"))).reshape(4, 6) * 2
    return spmd.constrain(y, P("a", "b")) - x


def random_numbers(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5) + torch.randn_like(x) * x.sum(1, keepdim=True)


def deep(weights: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """Equal layers, of which a memory limit makes the planner compute some twice."""

    def loss(weights: list[torch.Tensor]) -> torch.Tensor:
        h = x
        for weight in weights:
            h = h + torch.relu(h @ weight)
        return h.square().sum()

    return [w - 0.01 * g for w, g in zip(weights, torch.func.grad(loss)(weights), strict=True)]


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


WEIGHTS = {"up": P(None, "model"), "down": P("model")}
FLAT = {"data": 4}
SQUARE = {"data": 2, "model": 2}

PROGRAMS = {
    "train": Program(
        train,
        ({"up": draw(6, 12), "down": draw(12, 6)}, draw(8, 6)),
        (WEIGHTS, P("data")),
        (WEIGHTS, P()),
        {"data": 2, "model": 3},
    ),
    "heads": Program(heads, (draw(4, 6, 8), draw(8, 8)), (P("data", "model"), P("model")), P("data"), SQUARE),
    "vocabulary": Program(
        vocabulary,
        (draw(10, 4), torch.arange(24).view(4, 6) % 10),
        (P("model"), P("data")),
        P(),
        {"data": 2, "model": 3},
    ),
    "uneven": Program(uneven, (draw(7, 5), draw(5, 7).t().contiguous()), (P("data"), P(None, "data")), P(), FLAT),
    "constrained": Program(constrained, (draw(4, 6),), P("b"), P(None, "a"), {"a": 3, "b": 2}, plain=lambda x: x + 2),
    "random numbers": Program(random_numbers, (draw(6, 5),), P("data"), P(None, "model"), SQUARE),
    "deep": Program(
        deep,
        ([draw(16, 16) for _ in range(4)], draw(32, 16)),
        (P("data"), P("data")),
        P("data"),
        FLAT,
        {"memory_limit": 7000},
    ),
}


@pytest.fixture
def one_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request's rules derive, derived once: it does not depend on the file."""
    monkeypatch.setattr(restore, "prepare", functools.lru_cache(restore.prepare))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_by_their_saved_plans(name: str, tmp_path: Path) -> None:
    program, path = PROGRAMS[name], tmp_path / "plan.json"
    plan = program.jitted().plan(*program.args)
    plan.save(path)
    assert_right(program, path)
    Plan.load(path, plan.request).save(tmp_path / "again.json")
    assert path.read_bytes() == (tmp_path / "again.json").read_bytes()
    if name == "deep":
        assert "_again" in path.read_text()


def assert_right(program: Program, path: Path) -> None:
    for actual, expected in zip(program.run(plan=path), program.expected(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def count_outcomes(name: str, path: Path, seeds: range) -> collections.Counter[str]:
    """What becomes of edits: each is refused, or the plan computes the same; anything else fails."""
    program = PROGRAMS[name]
    plan = program.jitted().plan(*program.args)
    plan.save(path)
    sound = json.loads(path.read_text())
    found: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        changed = edit(sound, plan.mesh, random.Random(f"{name} {seed}"))
        path.write_text(json.dumps(changed))
        try:
            loaded = Plan.load(path, plan.request)
        except spmd.PlanError:
            found["refused"] += 1
            continue
        found["the same file" if changed == sound else "harmless"] += 1
        if str(loaded) != str(plan):
            found["another plan"] += 1
        assert_right(program, path)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_edited_plans_are_refused_or_right(name: str, tmp_path: Path, one_preparation: None) -> None:
    found = count_outcomes(name, tmp_path / "plan.json", range(40))
    assert found["refused"] >= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_edited_plans_are_refused_or_right(name: str, tmp_path: Path, one_preparation: None) -> None:
    found = count_outcomes(name, tmp_path / "plan.json", range(1000, 1700))
    assert found["refused"] >= 400
    assert found["another plan"] > 0
