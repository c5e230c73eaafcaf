"""Minimising a sum of cost tables over variables with small domains: exactly, or by large-neighbourhood search.

Independent of programs and meshes; imports `errors` only.
"""
