"""Variable elimination against exhaustive search."""

from itertools import combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd.errors import PlanError
from spmd.plan.solver.dominance import prune
from spmd.plan.solver.elimination import TooWideError, lower_bound, minimize
from spmd.plan.solver.neighbourhoods import evaluate, improve
from spmd.plan.solver.table import Table


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[Table]]:
    domains = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    scopes = draw(
        st.lists(st.sets(st.integers(0, len(domains) - 1), min_size=0, max_size=3).map(sorted), min_size=1, max_size=8)
    )
    costs = st.one_of(st.integers(0, 9).map(float), st.just(float("inf")))
    tables = []
    for scope in scopes:
        shape = [domains[variable] for variable in scope]
        count = torch.Size(shape).numel()
        values = draw(st.lists(costs, min_size=count, max_size=count))
        tables.append(Table(tuple(scope), torch.tensor(values, dtype=torch.float64).reshape(shape)))
    return domains, tables


def total(tables: list[Table], choices: tuple[int, ...]) -> float:
    return sum(float(table.costs[tuple(choices[variable] for variable in table.variables)]) for table in tables)


@given(problems())
def test_elimination_finds_the_minimum(problem: tuple[list[int], list[Table]]) -> None:
    domains, tables = problem
    best = min(total(tables, choices) for choices in product(*map(range, domains)))
    if best == float("inf"):
        with pytest.raises(PlanError, match="No assignment"):
            minimize(domains, tables)
        return
    solution = minimize(domains, tables)
    assert solution.cost == best
    assert total(tables, solution.choices) == best


@given(problems())
def test_choices_without_dominated_ones_have_an_optimum(problem: tuple[list[int], list[Table]]) -> None:
    domains, tables = problem
    pruned = prune(domains, tables)
    best = min(total(tables, choices) for choices in product(*map(range, domains)))
    left = [pruned.restore(choices) for choices in product(*map(range, pruned.domains))]
    assert min(total(tables, choices) for choices in left) == best
    least = min(total(list(pruned.tables), choices) for choices in product(*map(range, pruned.domains)))
    assert least == best


def test_a_choice_that_is_worse_whatever_its_neighbour_does_is_left_out_and_then_others_are() -> None:
    pair = Table((0, 1), torch.tensor([[0.0, 5.0], [1.0, 6.0], [9.0, 0.0]], dtype=torch.float64))
    single = Table((1,), torch.tensor([0.0, 10.0], dtype=torch.float64))
    assert prune([3, 2], [pair, single]).kept == ((0,), (0,))
    assert prune([3, 2], [pair]).kept == ((0, 2), (0, 1))


def test_a_variable_without_tables_takes_its_first_choice() -> None:
    assert minimize([3, 2], [Table((1,), torch.tensor([1.0, 0.0], dtype=torch.float64))]).choices == (0, 1)


def test_ties_break_towards_the_first_choice() -> None:
    assert minimize([3], [Table((0,), torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64))]).choices == (1,)


def test_a_table_that_would_be_too_large_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = [(a, b) for a in range(5) for b in range(a + 1, 5)]
    clique = [Table(pair, torch.rand(8, 8, generator=generator, dtype=torch.float64)) for pair in pairs]
    with pytest.raises(TooWideError, match=r"table of more than 1e\+03 cells"):
        minimize([8] * 5, clique, max_cells=1000)


@given(problems())
def test_neighbourhood_search_keeps_feasible_and_never_gets_worse(problem: tuple[list[int], list[Table]]) -> None:
    domains, tables = problem
    feasible = [choices for choices in product(*map(range, domains)) if evaluate(tables, choices) < float("inf")]
    if not feasible:
        return
    order = range(len(domains))
    found = improve(domains, tables, feasible[0], order, windows=(2,))
    assert found.cost == total(tables, found.choices)
    assert found.cost <= evaluate(tables, feasible[0])
    assert improve(domains, tables, feasible[0], order, windows=(len(domains),)).cost == minimize(domains, tables).cost


def test_neighbourhood_search_solves_what_is_too_wide_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = [(a, b) for a in range(12) for b in range(a + 1, 12)]
    clique = [Table(pair, torch.rand(4, 4, generator=generator, dtype=torch.float64)) for pair in pairs]
    with pytest.raises(TooWideError):
        minimize([4] * 12, clique, max_cells=4**8)
    best = minimize([4] * 12, clique, max_cells=4**12).cost
    found = improve([4] * 12, clique, [0] * 12, range(12), windows=(8,), max_cells=4**8)
    assert best <= found.cost <= 1.05 * best


@given(problems(), st.integers(1, 30))
def test_no_assignment_is_below_the_bound(problem: tuple[list[int], list[Table]], cells: int) -> None:
    domains, tables = problem
    best = min(total(tables, choices) for choices in product(*map(range, domains)))
    assert lower_bound(domains, tables, cells) <= best
    assert lower_bound(domains, tables) == best


def test_split_buckets_bound_what_cannot_be_joined() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = [(a, b) for a in range(6) for b in range(a + 1, 6)]
    clique = [Table(pair, torch.rand(4, 4, generator=generator, dtype=torch.float64)) for pair in pairs]
    best = minimize([4] * 6, clique).cost
    bounds = [lower_bound([4] * 6, clique, cells) for cells in (4, 64, 4**6)]
    assert 0 < bounds[0] < bounds[1] < best
    assert bounds[2] == pytest.approx(best)


def test_windows_from_a_start_that_is_not_allowed():
    """As a value that is never gathered, with consumers in all windows that start from replicated operands."""
    forbidden = float("inf")
    hub = Table((0,), torch.tensor([forbidden, 0.0], dtype=torch.float64))
    fits = torch.tensor([[0.0, forbidden], [forbidden, 0.1]], dtype=torch.float64)
    alike = torch.tensor([[0.0, 0.01], [0.01, 0.0]], dtype=torch.float64)
    near = [(i, i + apart) for apart in (1, 2) for i in range(1, 21 - apart)]  # three neighbours: none is reduced
    tables = [hub, *(Table((0, i), fits) for i in range(1, 21)), *(Table(pair, alike) for pair in near)]
    found = improve([2] * 21, tables, [0] * 21, range(21), windows=(4,))
    assert (1,) * 21 == found.choices
    assert pytest.approx(2.0) == found.cost


def test_a_value_that_is_never_gathered_moves_its_far_consumers():
    """The first variable is a producer with one choice, the second a hub, of which its three consumers want another."""
    forbidden = float("inf")
    hub = Table((0, 1), torch.tensor([[forbidden, 0.0]], dtype=torch.float64))
    wants = torch.tensor([[0.0, forbidden], [forbidden, 0.0]], dtype=torch.float64)
    alike = torch.tensor([[0.0, 0.01], [0.01, 0.0]], dtype=torch.float64)
    consumers = (2, 3, 4)
    tables = [hub, *(Table((1, consumer), wants) for consumer in consumers)]
    tables += [Table(pair, alike) for pair in combinations(consumers, 2)]  # three neighbours each: none is reduced
    found = improve([1, 2, 2, 2, 2], tables, [0] * 5, range(5), windows=(1,))
    assert found.choices == (0, 1, 1, 1, 1)
