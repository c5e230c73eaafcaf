"""The data of planning: requests, drafts (plans in progress), layouts, collectives, and the finished plan.

Imports `machine`, `rules`, `ir` and the packages below them.
"""
