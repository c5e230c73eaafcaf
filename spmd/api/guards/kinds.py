"""Kinds of values that functions read: plain values, containers, generators; whose code is whose."""

from __future__ import annotations

import argparse
import collections
import functools
import os
import random
import sys
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import torch

from spmd.core.static_key import static_key
from spmd.core.value_types import PLAIN
from spmd.job.user_code import is_installed, is_user_file

ROWS = (list, tuple, collections.deque)
SETS = (set, frozenset)
MAPPINGS = (dict, MappingProxyType)
NAMESPACES = (SimpleNamespace, argparse.Namespace)
LOOKUPS = (collections.ChainMap, collections.UserDict, collections.UserList, type(os.environ))
"""Containers written in Python whose items are read without effects."""

_PLAIN = frozenset({*PLAIN, type(Ellipsis), torch.Size})
CALLABLES = (FunctionType, BuiltinFunctionType, type, functools.partial)


def is_plain(value: Any) -> bool:
    """Test whether a value is compared by value."""
    return type(value) in _PLAIN


def is_array(value: Any) -> bool:
    """Test for an array of NumPy or of the standard library."""
    numpy = sys.modules.get("numpy")
    return type(value).__module__ == "array" or (numpy is not None and isinstance(value, numpy.ndarray))


def is_generator(value: Any) -> bool:
    """Test for a random generator of Python or NumPy that has a state."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def draws(module: Any) -> bool:
    """Test for a module that draws from a state unknown to torch."""
    return isinstance(module, ModuleType) and module.__name__ in ("random", "numpy.random")


@functools.lru_cache(maxsize=4096)
def is_users(kind: Any) -> bool:
    """Test whether a class is one of the user's code."""
    return _is_written_in(kind, is_user_file)


def is_users_object(value: object) -> bool:
    """Test whether an object is of a class of the user's code."""
    kind: Any = type(value)
    return is_users(kind)


@functools.lru_cache(maxsize=4096)
def is_own(kind: Any) -> bool:
    """Test whether a class is the user's own, not an installed package's."""
    return is_users(kind) and _is_written_in(kind, lambda file: not is_installed(file))


def _is_written_in(kind: Any, accepts: Any) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None) or "<stdin>" * (kind.__module__ == "__main__")
    return module is not None and accepts(file)


_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = os.path.dirname(os.path.abspath(collections.__file__)).rpartition(os.sep)[0] + os.sep
_READABLE = (
    *(f"{_TORCH}{name}" for name in ("optim", "amp", "cuda/amp", "distributions")),
    *(f"{_STANDARD}{name}" for name in ("collections", "types.py", "functools.py", "contextlib.py", "enum.py")),
)


@functools.lru_cache(maxsize=4096)
def is_library_code(file: str) -> bool:
    """Test for a library file of state rather than operators, whose code is followed."""
    return file.startswith(_READABLE) or (is_user_file(file) and is_installed(file))


@functools.lru_cache(maxsize=4096)
def is_own_code(file: str) -> bool:
    """Test for a file of the user's own, whose globals may change."""
    return is_user_file(file) and not is_installed(file)


def is_own_module(value: Any) -> bool:
    """Test whether a module is the user's own."""
    return isinstance(value, ModuleType) and is_own_code(getattr(value, "__file__", None) or "<frozen>")


def is_tensor_library(value: Any) -> bool:
    """Test for torch, spmd or the standard library, whose constants stay."""
    return isinstance(value, ModuleType) and not is_user_file(getattr(value, "__file__", None) or "<frozen>")


def key_of_value(value: Any) -> Any:
    """A key of a plain value that also tells types apart, or None where it has none."""
    try:
        hash(key := static_key(value))
    except TypeError:
        return None
    return key


def brief(value: Any) -> str:
    """A value in a message."""
    return f"{value!r:.40}" if is_plain(value) else type(value).__name__


def wrapped_by(value: Any) -> Any:
    """The function in a wrapper of `functools`, of `spmd.jit` and the like; else None."""
    return getattr(value, "__wrapped__", None) if callable(value) or isinstance(value, classmethod) else None
