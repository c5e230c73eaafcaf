"""What planning starts from and ends with: requests, drafts, layouts, collectives, and the frozen plan.

Imports `machine`, `rules`, `ir` and what is below them.
"""
