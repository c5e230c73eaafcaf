"""The intermediate representation: flat programs of functional operators, their text, and list operators.

Imports only `core` and what is below it.
"""
