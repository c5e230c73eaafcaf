"""The architecture of DESIGN.md: imports go down the layers, and no modules import each other in a circle."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import spmd

ROOT = Path(spmd.__file__).parent

LAYERS = (
    ("ambient", "documents", "errors", "torch_state", "undisturbed", "user_file"),
    ("alarm", "meeting", "process", "mesh", "placement"),
    ("spec", "tree"),
    ("collectives",),
    ("rules",),
    (
        "assignments",
