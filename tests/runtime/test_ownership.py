"""What is remembered of tensors that were owned does not hide that they are others now."""

from __future__ import annotations

import pytest
import torch

from spmd.runtime.ownership import Owned, is_owned


def test_tensors_in_the_place_of_others() -> None:
    owned = Owned()
    first, second = torch.ones(3, 3), torch.ones(3, 3)
    found = [owned([first, second]) for _ in range(2)]  # not in an assert, where pytest would hold the list
    second = second.data.t_()  # at the same address
    found += [owned([first, second]), is_owned([first, second])]
    assert found == [[True, True], [True, True], [True, False], [True, False]]


def test_other_memory_of_the_same_tensors() -> None:
    owned, other = Owned(), torch.ones(3)
    first, second = torch.ones(3), torch.ones(3)
    found = [owned([first, second]) for _ in range(2)]
    old = second.data
    second.set_(other)  # type: ignore[call-overload]
    found += [owned([first, second]) for _ in range(2)]
    del other, old
    found += [owned([first, second]) for _ in range(2)]
    assert found == [[True, True], [True, True], [True, False], [True, False], [True, True], [True, True]]


@pytest.mark.parametrize("count", [0, 1, 200])
def test_many_lists(count: int) -> None:
    owned = Owned()
    lists = [[torch.ones(2), torch.ones(3)] for _ in range(count)]
    for _ in range(2):
        for first, second in lists:
            found = owned([first, second])
            assert found == [False, False]  # `lists` holds them, too
    assert owned([]) == []
