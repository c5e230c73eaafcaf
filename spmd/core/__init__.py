"""The words of the field: meshes, placements, specs, pytrees.

Imports `errors` and `job` only.
"""
