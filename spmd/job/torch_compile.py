"""The border of torch.compile: what dynamo neither traces nor compiles, and runs as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_DYNAMO = "torch._dynamo"
_frames: Any = torch._C._dynamo.eval_frame
_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def never_compiled(function: _Function) -> _Function:
    """A function that is a graph break for torch.compile, with all that it calls; `torch.compiler.disable`.

    As an attribute and a flag of the code, it costs nothing where nothing is compiled, and needs no import of dynamo.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "it runs planned programs: put torch.compile inside of spmd.jit"
    _frames.set_code_exec_strategy(marked.__code__, _SKIPPED)
    return function


def when_dynamo_is_imported(then: Callable[[], None]) -> None:
    """Call a function as soon as `torch._dynamo` is imported, which takes a second: now, if it is."""
    if _DYNAMO in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _DynamoFinder(then))


class _DynamoFinder(MetaPathFinder):
    """Finds `torch._dynamo` with a loader that calls a function afterwards; it is gone then."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The spec of the module, if it is dynamo's."""
        if fullname != _DYNAMO:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self._then()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
