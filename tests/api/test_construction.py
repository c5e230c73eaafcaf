"""DTensors made: of one rank's tensors, of modules, by factories."""

from __future__ import annotations

import construction_cases as cases
import pytest
from workers import Workers

from spmd.collectives.distributed import scatter

NOISE = 8 << 20
"""Resident bytes that are neither shards nor a bucket: what libraries allocate at first use."""


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.SPECS)
def test_a_rank_holds_its_shards_and_a_bucket_while_one_rank_sends(workers: Workers, name: str) -> None:
    for peak, shards in workers.run(cases.memory_of_distribute, name, ranks=4):
        assert peak <= shards + scatter.BUCKET + NOISE
