"""The basic data types: meshes, placements, specs and pytrees.

Imports only `errors` and `job`.
"""
