"""The search: one minimisation for each mesh axis, in every order of the axes.

Imports `solver`, `cost`, `memory` and `data`.
"""
