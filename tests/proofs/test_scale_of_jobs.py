"""What a job costs each of its processes does not grow with their number."""

import pytest

from proofs.scale_of_jobs.measure import PHASES, measure
from proofs.scale_of_jobs.report import unnamed


@pytest.mark.slow
def test_operations_and_descriptors_of_a_rank_do_not_grow():
    lives = {ranks: measure(ranks) for ranks in (8, 16)}
    assert [] == unnamed(lives)
    for phase in PHASES:
        small, large = (
            [life.phases[phase] for rank, life in job.items() if rank not in (0, ranks // 2)]
            for ranks, job in lives.items()
        )
        if phase != "kill":  # where one of them collects what all say, and looks while it waits
            assert most(large, "total") <= most(small, "total") + 4, phase
        assert most(large, "descriptors") <= most(small, "descriptors") + 2, phase
    first, second = (job[0].phases["save"].descriptors for job in lives.values())
    assert second - first <= 4 * 8, "rank 0 has room for 4 connections of each rank"


def most(phases, what):
    """The most of a rank; one step more of a tree is two connections, each of two operations and a descriptor."""
    return max(getattr(each, what) for each in phases)
