"""Proof of rules by execution: `check_rule` runs every strategy of a rule on virtual shards, and searches for others.

A strategy is wrong if its results are not the shards of the unsharded operator's results. A row is missing if the plain
operator on shards computes the right results with its placements, and no strategy is this row or implies it. Rows imply
others because a replicated operand can be sharded locally, and a replicated result can be given any placement locally.
"""

from spmd.testing.rule_check.prove import check_rule
from spmd.testing.rule_check.report import Finding, Report

__all__ = ["Finding", "Report", "check_rule"]
