"""The pages for people who come from torch's DTensor and from JAX: they have every name, and name what exists."""

import re
from pathlib import Path

import pytest
import torch.distributed.tensor
import torch.distributed.tensor.debug
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel

import spmd

DOCS = Path(__file__).parents[1] / "docs"
NAMESPACES = (
    torch.distributed.tensor,
    torch.distributed.tensor.debug,
    torch.distributed.tensor.experimental,
    torch.distributed.tensor.parallel,
)
JAX = (
    "jit in_shardings out_shardings donate_argnums NamedSharding PartitionSpec shard_map make_mesh set_mesh reshard "
    "visualize_array_sharding with_sharding_constraint device_put psum ppermute"
)


def table(page):
    return [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]


def test_every_name_of_torch_is_in_the_table():
    left = " ".join(row.replace(r"\|", "").split(" | ")[0] for row in table("from_torch.md"))
    methods = {name for name in vars(torch.distributed.tensor.DTensor) if not name.startswith("_")}
    names = {name for module in NAMESPACES for name in module.__all__} | methods
    assert set() == {name for name in names - {"DTensor"} if not re.search(rf"\b{name}\b", left)}


@pytest.mark.parametrize("name", JAX.split())
def test_names_of_jax_are_in_the_table(name):
    assert re.search(rf"\b{name}\b", " ".join(row.split(" | ")[0] for row in table("from_jax.md")))


@pytest.mark.parametrize("page", ["from_torch.md", "from_jax.md"])
def test_what_the_tables_name_exists(page):
    named = set(re.findall(r"\bspmd((?:\.\w+)+)", " ".join(table(page))))
    assert len(named) > 15
    for name in named:
        found = spmd
        for part in name[1:].split("."):
            found = getattr(found, part)
