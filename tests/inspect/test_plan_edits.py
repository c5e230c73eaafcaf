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
from document_edits import edit, places

import spmd
from spmd import P
from spmd.core.pytree import tree_leaves
from spmd.inspect import Plan
from spmd.inspect.report.figures import make_report
from spmd.inspect.report.html import render_page
from spmd.inspect.saving import restore
from spmd.inspect.saving.document import encode_strategy, read
from spmd.plan.search.prepare import prepare
from spmd.rules.strategy import Strategy


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


def constrained_twice(x: torch.Tensor) -> torch.Tensor:
    """Its plan scatters the sum, which never lies as the first constraint says."""
    return spmd.reshard(spmd.reshard(x.sum(0), P()), P("data")) + 1


def random_numbers(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5) + torch.randn_like(x) * x.sum(1, keepdim=True)


def ordered(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Dims that two axes shard, values that depend on no argument, and sums along a sharded dim."""
    z = (x - y).cumsum(0) * torch.arange(8) + torch.zeros(9, 8)
    return z - x.argmax(0)


def lists(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> list[torch.Tensor]:
    """List operators, which are planned element by element and run together."""
    return torch._foreach_mul(torch._foreach_add(xs, ys, alpha=2), ys)  # type: ignore[no-any-return]


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


REPLICATED = Strategy((), ())

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
    "ordered": Program(
        ordered,
        (draw(9, 8), draw(8, 9).t().contiguous()),
        (P(("data", "model")), P(("data", "model"))),
        P("model"),
        SQUARE,
    ),
    "constrained": Program(constrained, (draw(4, 6),), P("b"), P(None, "a"), {"a": 3, "b": 2}, plain=lambda x: x + 2),
    "constrained twice": Program(
        constrained_twice, (draw(4, 6),), P("data"), P("data"), SQUARE, plain=lambda x: x.sum(0) + 1
    ),
    "random numbers": Program(random_numbers, (draw(6, 5),), P("data"), P(None, "model"), SQUARE),
    "lists": Program(
        lists,
        ([draw(6, 4), draw(4, 6), draw(6, 4)], [draw(4, 6).t().contiguous(), draw(6, 4).t().contiguous(), draw(6, 4)]),
        (P("data"), P(None, "model")),
        P("data"),
        SQUARE,
    ),
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


def options_of(plan: Plan) -> list[list[dict[str, Any]]]:
    """The strategies that the rule of each operation of a plan's program has, as documents say them."""
    found = prepare(plan.request).options
    return [list(map(encode_strategy, found.get(o, (REPLICATED,)))) for o in plan.request.graph.operations]


def count_outcomes(name: str, path: Path, seeds: range) -> collections.Counter[str]:
    """What becomes of edits: each is refused, or the plan computes the same; anything else fails."""
    program = PROGRAMS[name]
    plan = program.jitted().plan(*program.args)
    plan.save(path)
    sound = json.loads(path.read_text())
    options = options_of(plan)
    found: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        changed = edit(sound, plan.mesh, options, random.Random(f"{name} {seed}"))
        path.write_text(json.dumps(changed))
        try:
            loaded = Plan.load(path, plan.request)
            assert_right(program, path)
        except spmd.PlanError:
            found["refused"] += 1
        else:
            found["another plan" if str(loaded) != str(plan) else "the same plan"] += 1
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_edited_plans_are_refused_or_right(name: str, tmp_path: Path, one_preparation: None) -> None:
    found = count_outcomes(name, tmp_path / "plan.json", range(15))
    assert found["refused"] >= 5


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_edited_plans_are_refused_or_right(name: str, tmp_path: Path, one_preparation: None) -> None:
    found = count_outcomes(name, tmp_path / "plan.json", range(1000, 1700))
    assert found["refused"] >= 400
    assert found["another plan"] >= 50


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_or_right(count: int, tmp_path: Path, one_preparation: None) -> None:
    program, path, draws = PROGRAMS["train"], tmp_path / "plan.json", random.Random(count)
    plan = program.jitted().plan(*program.args)
    plan.save(path)
    sound = path.read_bytes()
    for number in range(count):
        bit = draws.randrange(8 * len(sound))
        flipped = sound[: bit // 8] + bytes([sound[bit // 8] ^ 1 << bit % 8]) + sound[bit // 8 + 1 :]
        path.write_bytes(sound[: bit // 8] if number % 4 == 0 else flipped)
        try:
            loaded = Plan.load(path, plan.request)
        except spmd.PlanError:
            continue
        assert number % 4 or bit // 8 == len(sound) - 1  # all but the last line break
        if str(loaded) != str(plan):
            assert_right(program, path)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_edited_plans_are_refused_or_reported(count: int, tmp_path: Path) -> None:
    path, draws = tmp_path / "plan.json", random.Random(count)
    plan = PROGRAMS["train"].jitted().plan(*PROGRAMS["train"].args)
    plan.save(path)
    sound, options, reported = json.loads(path.read_text()), options_of(plan), 0
    for _ in range(count):
        path.write_text(json.dumps(edit(sound, plan.mesh, options, draws)))
        try:
            document = read(path)
        except spmd.PlanError:
            continue
        assert render_page(make_report(document)).startswith("<!DOCTYPE html>")
        reported += 1
    assert reported > count // 4


def test_texts_of_a_plan_cannot_become_markup(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PROGRAMS["train"].jitted().plan(*PROGRAMS["train"].args).save(path)
    document = json.loads(path.read_text())
    bad = "<script>alert(1)</script>"
    for container, key in places(document):
        if isinstance(container[key], str) and (container, key) != (document, "format") and key != "kind":
            container[key] = bad
    document["mesh"] = {bad: 2}
    path.write_text(json.dumps(document))
    assert bad not in render_page(make_report(read(path)))


def test_collectives_that_take_no_time_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PROGRAMS["train"].jitted().plan(*PROGRAMS["train"].args).save(path)
    document = json.loads(path.read_text())
    for item in (*document["operations"], *document["comms"]):
        item["seconds"] = 0.0
    path.write_text(json.dumps(document))
    assert "Timeline" in render_page(make_report(read(path)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ('{"format": 10, "format": 3}', "the key 'format' is there twice"),
        ('{"format": NaN}', "NaN is not a number of JSON"),
        ('{"format": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"format": 10.0}', "has format 10.0, expected 10"),
        ('{"format": true}', "has format True, expected 10"),
        ('{"format": 10}', "the document must have 'mesh'"),
        ("\ud800".encode("utf-8", "surrogatepass"), "can't decode"),
    ],
    ids=range(9),
)
def test_texts_that_are_no_plans_are_refused(text: str | bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(spmd.PlanError, match=reason):
        read(path)


def test_machines_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PROGRAMS["train"].jitted().plan(*PROGRAMS["train"].args).save(path)
    document = json.loads(path.read_text())
    document["machine"]["overlap"] = 2.0
    path.write_text(json.dumps(document))
    with pytest.raises(spmd.PlanError, match=r"damaged: Machine overlap must be in 0..1 \(got 2.0\)"):
        read(path)


def test_folders_are_no_plans(tmp_path: Path) -> None:
    with pytest.raises(spmd.PlanError, match="cannot be read: Is a directory"):
        read(tmp_path)


def test_plans_that_gather_what_is_kept_are_refused_whatever_they_say(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    x, w = draw(64, 4), draw(4, 4)
    mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
    specs = (P(), P("data"))
    jitted = functools.partial(spmd.jit, torch.matmul, specs, P(), mesh=mesh)
    plan = jitted().plan(x, w)
    plan.save(path)
    document = json.loads(path.read_text())
    assert any("gathered" in name for name in document["values"])
    document["keep_sharded"] = {value.name: ["data"] for value in plan.request.graph.inputs}
    path.write_text(json.dumps(document))
    with pytest.raises(spmd.PlanError, match="gathers along 'data' what keep_sharded says to keep"):
        jitted(plan=path, keep_sharded={1: "data"}).plan(x, w)
