"""Where launches start, and in which order."""

import pytest

from spmd.ir.launch_schedule import PlacedCall, PlacedLaunch, launch_order, placed, starts


def launch(ready: float, place: float, needed: float, bytes: float = 1.0) -> PlacedLaunch:
    return PlacedLaunch(ready, place, needed, bytes)


def test_a_launch_starts_when_its_operands_are_made():
    assert starts([launch(3, 8, 10)], 1.0) == [3]


def test_launches_ahead_of_their_places_share_the_window():
    launches = [launch(0, place, place + 1, 2.0) for place in (2, 4, 6, 8)]
    assert starts(launches, 4.0) == [0, 0, 2, 4]
    assert starts(launches, 2.0) == [0, 2, 4, 6]
    assert starts(launches, 1.0) == [0, 2, 4, 6], "one may always start early"
    assert starts(launches, 0.0) == [2, 4, 6, 8]


def test_starts_are_in_launch_order_and_before_results_are_needed():
    assert starts([launch(5, 5, 9), launch(0, 6, 7)], 1.0) == [5, 5]
    assert starts([launch(5, 5, 9), launch(0, 2, 3)], 1.0) == [3, 3]


def test_what_is_needed_first_starts_first():
    gradient, weight = launch(10, 10, 100), launch(0, 11, 12)
    assert launch_order([gradient, weight], 1.0) == [weight, gradient]
    assert launch_order([gradient, weight], 0.0) == [gradient, weight]


def test_a_launch_is_not_delayed_for_one_whose_operands_come_later():
    gradient, late = launch(10, 10, 100), launch(50, 55, 60)
    assert launch_order([late, gradient], 1.0) == [gradient, late]


def test_with_a_full_window_the_most_urgent_waits_for_room():
    first, second, third = (launch(0, place, place) for place in (4, 6, 5))
    assert launch_order([first, second, third], 1.0) == [first, third, second]


@pytest.mark.parametrize("window", [0.0, 1.0, 3.0])
def test_the_order_can_start(window: float):
    """Whatever launches there are, none starts after its result is needed, or before its operands are made."""
    launches = [launch(7 * n % 13, 7 * n % 13 + n % 5, 7 * n % 13 + n % 5 + n % 3) for n in range(40)]
    ordered = launch_order(launches, window)
    assert sorted(map(id, ordered)) == sorted(map(id, launches))
    for one, start in zip(ordered, starts(ordered, window), strict=True):
        assert one.ready <= start <= one.needed


def test_a_result_that_another_launch_sends_is_needed_when_that_one_starts():
    first, second = PlacedCall(3, ["x"], ["y"], 1.0), PlacedCall(4, ["y"], ["z"], 1.0)
    others = PlacedCall(9, ["u"], ["v"], 1.0)
    launches = placed([[first, others], [second]], {"x": 2, "u": 8}, {"z": 20, "v": 30}, 40)
    assert [(one.ready, one.place, one.needed) for one in launches] == [(4, 9, 4), (4, 4, 20)]
    later = PlacedCall(12, ["y"], ["z"], 1.0)
    launches = placed([[first, others], [later]], {"x": 2, "u": 8}, {"z": 20, "v": 30}, 40)
    assert [(one.ready, one.place, one.needed) for one in launches] == [(9, 9, 12), (12, 12, 20)]
