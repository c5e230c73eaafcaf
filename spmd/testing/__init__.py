"""Tools for tests of programs that use `spmd`: Hypothesis strategies, jobs on this host, measured communication and
memory, and rules by execution (`rule_check/`).

This file imports nothing, because some of the modules need Hypothesis: import names from the modules.
"""
