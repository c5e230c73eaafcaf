"""From a traced program to its canonical form: with fewer operators, fewer sharding rules are needed.

Imports only `tracing`, `ir` and what is below them.
"""
