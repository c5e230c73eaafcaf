"""From a plan to the program that each rank runs.

Imports `plan.local` and what is below it; the planner measures what it lowers.
"""
