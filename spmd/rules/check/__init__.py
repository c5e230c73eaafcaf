"""Proof of rules by execution: `check_rule` runs every strategy of a rule on virtual shards, and looks for more.

A strategy is wrong if its shards are not those of the unsharded operator's results. A row is missing if running the
plain operator on shards is right and no strategy says so, nor implies it: a replicated operand can be cut for free, and
a replicated result stands for any other.
"""

from spmd.rules.check.prove import check_rule
from spmd.rules.check.report import Finding, Report

__all__ = ["Finding", "Report", "check_rule"]
