"""From a Python function to a program: recording operators, functionalization, and the user's source lines.

Imports only `ir` and what is below it. `canonicalize` imports these modules; they do not import `canonicalize`.
"""
