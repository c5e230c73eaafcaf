"""The rules of torch's operators: one table for each family.

Imports the language of rules (`rule`, `notation`, `partial`, `builders`) and, for local implementations, `collectives`.
"""
