"""Python source from a rank's graph: straight-line code with almost no overhead beyond the operators that it calls.

In the virtual runtime, where ranks run in lockstep, the code is a generator that suspends at every primitive and random
operator: `y = (yield (x, ...)).pop()` passes the arguments to the runtime and pops the result from a list, so that only
the program holds a reference to it. It suspends at random operators because ranks share one random number generator. In
the distributed runtime, where each rank has its own process, the code is a plain function.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import attrs
import torch
import torch.fx as fx

from spmd.lowering.passes.clean import is_random_node
from spmd.lowering.program import is_primitive
from spmd.tracing.recorder import where

RankProgram: TypeAlias = Callable[[list[torch.Tensor]], Any]
"""A function of the list of local inputs, which it empties. A plain function returns the tuple of local outputs. In
lockstep it is a generator function: it yields the arguments of each stop, is sent a list that ends with the stop's
result, and finally yields the tuple of local outputs."""


@attrs.frozen
class SuspensionPoint:
    """A point at which a generator suspends, so that all ranks run one operator together.

    Args:
        op: a primitive or a random operator.
        keywords: the names of the last of the yielded arguments, which are keyword arguments; () for a primitive.
    """

    op: torch._ops.OpOverload
    keywords: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Generated:
    """A compiled rank program.

    Args:
        function: the program.
        stops: its stops, in order of execution; () if it does not run in lockstep.
        source: its Python source.
    """

    function: RankProgram
    stops: tuple[SuspensionPoint, ...]
    source: str


def generate(module: fx.GraphModule, *, lockstep: bool = True) -> Generated:
    """Compile a lowered graph to a function that deletes every variable after its last use.

    Args:
        module: the graph and its constants.
        lockstep: whether to make a generator function, which suspends at stops; else a plain function.
    """
    writer = _Writer(module, lockstep)
    namespace = writer.namespace
    namespace[_LINES] = writer.origins
    exec(compile(writer.source, _FILE, "exec"), namespace)
    return Generated(namespace["program"], tuple(writer.stops), writer.source)


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
    node = trace.tb_frame.f_globals[_LINES].get(trace.tb_lineno)
    if node is not None:
        tensors = ", ".join(str(operand.meta.get("val")) for operand in node.all_input_nodes)
        origin = f"{node.target} on {tensors} of this rank, at {where(node.meta.get('source'))}"
        error.args = (f"{error.args[0]}\n  In {origin}.", *error.args[1:])


class _Writer:
    """The source under construction, and the objects that it refers to by name."""

    def __init__(self, module: fx.GraphModule, lockstep: bool) -> None:
        self.lockstep = lockstep
        self.namespace: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.stops: list[SuspensionPoint] = []
        self.origins: dict[int, fx.Node] = {}
        nodes = list(module.graph.nodes)
        self.variables = {node: f"v{index}" for index, node in enumerate(nodes)}
        inputs = [self.variables[node] for node in nodes if node.op == "placeholder"]
        lines = ["def program(inputs):", f"    [{', '.join(inputs)}] = inputs", "    inputs.clear()"]
        dying = _last_uses(nodes)
        for node in nodes:
            self.origins[len(lines) + 1] = node
            lines += self.statement(node, module)
            if dying[node]:
                lines.append(f"    del {', '.join(self.variables[other] for other in dying[node])}")
        self.source = "\n".join(lines)

    def statement(self, node: fx.Node, module: fx.GraphModule) -> list[str]:
        name, target = self.variables[node], cast(Any, node.target)
        if node.op == "placeholder":
            return []
        if node.op == "get_attr":
            return [f"    {name} = {self.reference(getattr(module, target))}"]
        if node.op == "output":
            outputs = [f"{self.argument(value)}{'.clone()' if _is_constant(value) else ''}" for value in _outputs(node)]
            return [f"    {'yield' if self.lockstep else 'return'} ({', '.join(outputs)}{',' if outputs else ''})"]
        if target is operator.getitem:
            return [f"    {name} = {self.argument(node.args[0])}[{node.args[1]!r}]"]
        arguments = [self.argument(argument) for argument in node.args]
        if self.lockstep and (is_primitive(node) or is_random_node(node)):
            self.stops.append(SuspensionPoint(target, () if is_primitive(node) else tuple(node.kwargs)))
            arguments += [self.argument(value) for value in node.kwargs.values()]
            return [f"    {name} = (yield ({', '.join(arguments)},)).pop()"]
        arguments += [f"{key}={self.argument(value)}" for key, value in node.kwargs.items()]
        return [f"    {name} = {self.reference(getattr(target, '_op', target))}({', '.join(arguments)})"]

    def argument(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return self.variables[argument]
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


def _outputs(node: fx.Node) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", node.args[0])


def _is_constant(value: Any) -> bool:
    """Whether a value may alias a constant of the program, which the caller must not be able to write to."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        if isinstance(value.target, torch._ops.OpOverload) and not _may_alias(value.target):
            return False
        value = next(iter(value.all_input_nodes), None)
    return isinstance(value, fx.Node) and value.op == "get_attr"


def _may_alias(op: torch._ops.OpOverload) -> bool:
    """Whether a result may alias the first operand; composite operators and primitives are assumed to."""
    is_view = any(argument.alias_info is not None for argument in op._schema.arguments)
    return is_view or op._can_decompose() or op.namespace == "spmd"


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that can be freed after it."""
    dying: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    seen: set[fx.Node] = set()
    for node in reversed(nodes[:-1]):
        for operand in dict.fromkeys(node.all_input_nodes):
            if operand not in seen and not any(user.op == "output" for user in operand.users):
                dying[node].append(operand)
            seen.add(operand)
    return dying
