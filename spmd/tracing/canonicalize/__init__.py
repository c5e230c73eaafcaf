"""From a program as it was traced to one spelling for each meaning: few operators make few rules.

Imports `tracing` and `ir`.
"""
