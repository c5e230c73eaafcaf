"""Programs: flat lists of functional operators over tensors, how they print, list operators taken apart and joined.

Imports `core`.
"""
