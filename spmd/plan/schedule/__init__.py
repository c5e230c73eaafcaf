"""The schedule of a plan's launches: the predicted time of a step under it, and the choice of the fastest.

Imports `memory`, `cost` and `data`.
"""
