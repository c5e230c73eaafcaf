"""Python source from a rank's graph: straight-line code, which costs next to nothing above the operators that it calls.

Where ranks run in lock step, the code is a generator that stops at every collective and at every draw:
`y = (yield (x, ...)).pop()` hands the arguments of a collective to whoever drives the ranks and takes its result, out
of a list, so that nobody but the program holds it. Random numbers are drawn at a stop, because ranks share one
generator. Where each rank has a process of its own, the code is a function that does all itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import attrs
import torch
import torch.fx as fx

from spmd.lowering.passes.clean import is_draw
from spmd.lowering.program import is_primitive
from spmd.tracing.recorder import where

RankProgram: TypeAlias = Callable[[list[torch.Tensor]], Any]
"""A function of the list of local inputs, which it empties. In lock step a generator function: it yields the arguments
of each stop, is sent a list that ends in its result, and yields the tuple of local outputs at last. Else it returns
that tuple."""


@attrs.frozen
class Stop:
    """Where all ranks meet.

    Args:
        op: a collective primitive or an operator that draws.
        keywords: names of the last of the arguments that are yielded; a primitive's are all positional.
    """

    op: torch._ops.OpOverload
    keywords: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Generated:
    """A compiled rank program.

    Args:
        function: the program.
        stops: in order; none if it does not run in lock step.
        source: its text.
    """

    function: RankProgram
    stops: tuple[Stop, ...]
    source: str


def generate(module: fx.GraphModule, *, lockstep: bool = True) -> Generated:
    """Compile a lowered graph; every variable is deleted after its last use."""
    writer = _Writer(module, lockstep)
    namespace = writer.namespace
    namespace[_LINES] = writer.origins
    exec(compile(writer.source, _FILE, "exec"), namespace)
    return Generated(namespace["program"], tuple(writer.stops), writer.source)


_FILE, _LINES = "<spmd local program>", "origins"


def name_origin(error: BaseException) -> None:
    """Say in an error that an operator of a generated program raised which operator it is, and the user's line."""
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
    """The text being written and the objects that it refers to by name."""

    def __init__(self, module: fx.GraphModule, lockstep: bool) -> None:
        self.lockstep = lockstep
        self.namespace: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.stops: list[Stop] = []
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
        if self.lockstep and (is_primitive(node) or is_draw(node)):
            self.stops.append(Stop(target, () if is_primitive(node) else tuple(node.kwargs)))
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
        """A global of the program that holds an operator, a dtype, a tensor, ..."""
        if id(target) not in self.known:
            self.known[id(target)] = f"g{len(self.known)}"
            self.namespace[self.known[id(target)]] = target
        return self.known[id(target)]


def _outputs(node: fx.Node) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", node.args[0])


def _is_constant(value: Any) -> bool:
    """Whether a value may share memory with a constant of the program, which its caller must not get to write to."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        if isinstance(value.target, torch._ops.OpOverload) and not _may_alias(value.target):
            return False
        value = next(iter(value.all_input_nodes), None)
    return isinstance(value, fx.Node) and value.op == "get_attr"


def _may_alias(op: torch._ops.OpOverload) -> bool:
    """Whether a result may share memory with the first operand; what is made of other operators is not looked into."""
    is_view = any(argument.alias_info is not None for argument in op._schema.arguments)
    return is_view or op._can_decompose() or op.namespace == "spmd"


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nothing needs after it."""
    dying: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    seen: set[fx.Node] = set()
    for node in reversed(nodes[:-1]):
        for operand in dict.fromkeys(node.all_input_nodes):
            if operand not in seen and not any(user.op == "output" for user in operand.users):
                dying[node].append(operand)
            seen.add(operand)
    return dying
