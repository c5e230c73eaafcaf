"""Python source from a rank's program: straight-line code with almost no overhead beyond the operators that it calls.

In the virtual runtime, where ranks run in lockstep, the code is a generator that suspends at every operation with an
effect: `y = (yield op, ((x, ...), {})).pop()` passes the call to the runtime and pops the result from a list, so that
only the program holds a reference to it. In the distributed runtime, where each rank has its own process, the code is a
plain function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeAlias

import attrs
import torch

from spmd.collectives.distributed.bucket import Bucket
from spmd.collectives.local import LOCALS, run_local
from spmd.core.mesh import Mesh
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.in_place import InPlace
from spmd.runtime.bindings import callable_of
from spmd.runtime.in_place import call_in_place
from spmd.tracing.recorder import where

RankProgram: TypeAlias = Callable[..., Any]
"""A function of the list of local inputs, which it empties, that returns the tuple of local outputs. In lockstep it
takes the rank's number, too, and is a generator function: at every effect it yields an operator and its call, the pair
of its arguments and keyword arguments, and is sent a list that ends with the result; it finally yields None and the
outputs."""


@attrs.frozen(eq=False)
class Generated:
    """A compiled rank program and its Python source."""

    function: RankProgram
    source: str


def generate(graph: Graph, lockstep: Mesh | None = None) -> Generated:
    """Compile a rank's program to a function that deletes every variable after its last use.

    Args:
        graph: the program.
        lockstep: the mesh whose ranks run in lockstep: the function is a generator function then, else a plain one.
    """
    writer = _Writer(graph, lockstep)
    namespace = writer.namespace
    namespace[_LINES] = writer.origins
    exec(compile(writer.source, _FILE, "exec"), namespace)
    return Generated(namespace["program"], writer.source)


_FILE, _LINES = "<spmd local program>", "origins"


def name_origin(error: BaseException) -> None:
    """Add to the message of an error from a generated program which operator raised it, and the user's line.

    Other errors, and those without a text message, are not changed.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != _FILE:
        trace = trace.tb_next
    if trace is None or not error.args or not isinstance(error.args[0], str):
        return
    operation = trace.tb_frame.f_globals[_LINES].get(trace.tb_lineno)
    if operation is not None:
        tensors = ", ".join(str(operand.meta) for operand in dict.fromkeys(operation.operands))
        op = operation.op.__self__ if isinstance(operation.op, MethodType) else operation.op
        origin = f"{op} on {tensors} of this rank, at {where(operation.source)}"
        error.args = (f"{error.args[0]}\n  In {origin}.", *error.args[1:])


class _Writer:
    """The source under construction, and the objects that it refers to by name."""

    def __init__(self, graph: Graph, lockstep: Mesh | None) -> None:
        self.lockstep = lockstep
        self.namespace: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.origins: dict[int, Operation] = {}
        self.variables: dict[Value, str] = {}
        self.constants = dict(graph.constants)
        inputs = ", ".join(map(self.variable, graph.inputs))
        head = "inputs" if lockstep is None else "inputs, rank"
        lines = [f"def program({head}):", f"    [{inputs}] = inputs", "    inputs.clear()"]
        dying = _last_uses(graph)
        for value in dying[None]:
            lines.append(f"    del {self.variable(value)}")
        for operation in graph.operations:
            self.origins[len(lines) + 1] = operation
            lines += self.statements(operation)
            if dying[operation]:
                lines.append(f"    del {', '.join(map(self.variable, dying[operation]))}")
        aliases = _aliases(graph)
        outputs = "".join(
            f"{self.argument(value)}{'.clone()' if value in aliases else ''}, " for value in graph.outputs
        )
        lines.append(f"    return ({outputs})" if lockstep is None else f"    yield None, ({outputs})")
        self.source = "\n".join(lines)

    def variable(self, value: Value) -> str:
        return self.variables.setdefault(value, f"v{len(self.variables)}")

    def statements(self, operation: Operation) -> list[str]:
        call = self.call(operation)
        if not operation.returns_tuple:
            return [f"    {self.variable(operation.tensors[0])} = {call}"]
        results = [(index, value) for index, value in enumerate(operation.results) if value is not None]
        items = [f"    {self.variable(value)} = results[{index}]" for index, value in results]
        return [f"    results = {call}", *items, "    del results"]

    def call(self, operation: Operation) -> str:
        positional = [self.argument(argument) for argument in operation.args]
        if isinstance(operation.op, InPlace) and not operation.op.takes_lists:
            positional[0] = f"[{positional[0]}]"
        if self.lockstep is not None and operation.effect is not None:
            options = ", ".join(f"{key!r}: {self.argument(value)}" for key, value in operation.kwargs.items())
            arguments = "".join(f"{argument}, " for argument in positional)
            return f"(yield {self.reference(operation.op)}, (({arguments}), {{{options}}})).pop()"
        keywords = [f"{key}={self.argument(value)}" for key, value in operation.kwargs.items()]
        if self.lockstep is not None and operation.op in LOCALS:
            run = self.reference(_local(operation.op, self.lockstep))
            return f"{run}(rank, {', '.join([*positional, *keywords])})"
        return f"{self.reference(_callable_of(operation))}({', '.join([*positional, *keywords])})"

    def argument(self, argument: Any) -> str:
        if isinstance(argument, Value):
            if argument in self.constants:
                return self.reference(self.constants[argument])
            return self.variable(argument)
        if isinstance(argument, tuple):
            return f"({', '.join(self.argument(item) for item in argument)}{',' if len(argument) == 1 else ''})"
        if isinstance(argument, list):
            return f"[{', '.join(self.argument(item) for item in argument)}]"
        literal = argument is None or isinstance(argument, (bool, int, str))
        if literal or (isinstance(argument, float) and math.isfinite(argument)):
            return repr(argument)
        return self.reference(argument)

    def reference(self, target: Any) -> str:
        """The name of a global of the program that holds an operator, a dtype, a tensor, ..."""
        if id(target) not in self.known:
            self.known[id(target)] = f"g{len(self.known)}"
            self.namespace[self.known[id(target)]] = target
        return self.known[id(target)]


def _callable_of(operation: Operation) -> Callable[..., Any]:
    if operation.effect is not None:
        return getattr(operation.op, "_op", operation.op)  # type: ignore[no-any-return]
    call = operation.call()
    if isinstance(call.op, InPlace):
        return call_in_place(call.op, call.args, dict(call.kwargs))
    return callable_of(call.op, call.args, call.kwargs)


@functools.lru_cache(maxsize=1024)
def _local(op: torch._ops.OpOverload, mesh: Mesh) -> Callable[..., torch.Tensor]:
    return functools.partial(run_local, op, mesh)


def _aliases(graph: Graph) -> set[Value]:
    """The values that may alias a constant of the program, which the caller must not be able to write to, or a bucket,
    which would be held as a whole.
    """
    found = {value for value, _ in graph.constants}
    for operation in graph.operations:
        is_bucket = isinstance(operation.op, MethodType) and isinstance(operation.op.__self__, Bucket)
        if is_bucket or (operation.operands and operation.operands[0] in found and _may_alias(operation)):
            found.update(operation.tensors)
    return found


def _may_alias(operation: Operation) -> bool:
    """Whether a result may alias the first operand; composite operators, primitives and functions are assumed to."""
    if not isinstance(operation.op, torch._ops.OpOverload) or operation.is_view:
        return True
    return operation.op._can_decompose() or operation.op.namespace == "spmd"


def _last_uses(graph: Graph) -> dict[Operation | None, list[Value]]:
    """For each operation, the variables that can be freed after it; for None, the inputs that are not used."""
    dying: dict[Operation | None, list[Value]] = {None: []}
    seen = {*graph.outputs, *(value for value, _ in graph.constants)}
    for operation in reversed(graph.operations):
        last = [value for value in dict.fromkeys((*operation.operands, *operation.tensors)) if value not in seen]
        dying[operation] = last
        seen.update(last)
    dying[None] = [value for value in dict.fromkeys(graph.inputs) if value not in seen]
    return dying
