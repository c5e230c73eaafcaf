"""Manual regions in a trace: what one rank does, with the types of its values along the manual mesh axes.

Imports `tracing`, `rules`, `collectives` and what is below them.
"""
