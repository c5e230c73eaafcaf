"""What functions read beside their arguments: found in their bytecode, and compared at each call.

Imports `core`, `job`, and `tracing.source` for lines.
"""
