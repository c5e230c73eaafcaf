"""This process among others: how a job starts, and what became of a rank that does not answer. No tensors.

Imports `errors` only.
"""
