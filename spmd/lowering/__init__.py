"""From a plan to the program that each rank runs.

Imports `plan` and what is below it.
"""
