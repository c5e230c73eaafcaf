"""Tools for tests of programs that use `spmd`: Hypothesis strategies, jobs on this host, and measured
communication and memory.

This file imports nothing, because some of the modules need Hypothesis: import names from the modules.
"""
