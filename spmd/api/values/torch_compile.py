"""DTensors under torch.compile: graph breaks, as their operators are planned programs already."""

from __future__ import annotations

from spmd.api.values.dtensor import DTensor
from spmd.job.torch_compile import when_dynamo_is_imported


def _leave_to_python() -> None:
    from torch._dynamo import config, trace_rules  # imported already

    config.nontraceable_tensor_subclasses.add(DTensor)
    trace_rules.add("spmd")


def keep_out_of_graphs() -> None:
    """Let dynamo neither trace operators on DTensors nor functions of this package."""
    when_dynamo_is_imported(_leave_to_python)
