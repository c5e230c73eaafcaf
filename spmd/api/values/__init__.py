"""`DTensor`, how one is made of tensors and of torch's own DTensors, and which collectives eager code ran.

Imports `runtime` and what is below it.
"""
