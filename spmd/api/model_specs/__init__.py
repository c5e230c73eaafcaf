"""Specs for the tensors of a model: by path, fully sharded, and tensor parallel as its structure allows.

What takes only a tree imports `core`; `tensor_parallel` reads a traced program: it imports the tracer, the rules and
the planner's atoms.
"""
