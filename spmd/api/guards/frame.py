"""Runs the bytecode of a function over what its variables may be, without running the function."""

from __future__ import annotations

from collections.abc import Callable

from spmd.api.guards.flow_instructions import FlowInstructions
from spmd.api.guards.instructions import Instruction, handlers_of, instructions_of
from spmd.api.guards.limits import PASSES
from spmd.api.guards.things import UNKNOWN, Values, constant, union
from spmd.api.guards.value_instructions import ValueInstructions

_OLD_BINARY = {"BINARY_ADD": "+", "BINARY_SUBTRACT": "-", "BINARY_MULTIPLY": "*", "BINARY_MODULO": "%"}
_PUSHES_ONE = ("LOAD_BUILD_CLASS", "LOAD_ASSERTION_ERROR", "LOAD_LOCALS", "LOAD_COMMON_CONSTANT")


class Frame(ValueInstructions, FlowInstructions):
    """One call of a function, as `StackFrame`; a method for each instruction, named after it."""

    def run(self) -> Values:
        """The value that the function returns."""
        parameters, instructions, handlers = self.local, instructions_of(self.code), handlers_of(self.code)
        for _ in range(PASSES):
            self._grown, alive = False, True
            self.stack, self.local = [], dict(parameters)
            for each in instructions:
                state = self._pending.get(each.offset)
                if each.offset in handlers and state is None:
                    state = [UNKNOWN] * handlers[each.offset], dict(self._stored)
                if not alive and state is None:
                    continue
                if state is not None:
                    self._enter(state, alive)
                alive = self._do(each)
            if not self._grown:
                return self.result or UNKNOWN
        for values in (*self._stored.values(), self.result):  # a loop reaches more each time that it runs
            self.reader.whole(values, self.line)
        return union(self.result, UNKNOWN)

    # The instructions. Each returns whether the next one is reached.

    def _do(self, each: Instruction) -> bool:
        self._line = each.line
        self.reader.count(self.line)
        method: Callable[[Instruction], bool | None] | None = getattr(self, f"_{each.name.lower()}", None)
        if method is not None:
            return method(each) is not False
        if each.target is not None:
            return self._branch(each)
        if each.name.startswith(("RETURN", "RERAISE", "RAISE", "INTERPRETER_EXIT")):
            return self._leave(each)
        if each.name.startswith(("LOAD_FAST", "STORE_FAST")):
            self._fast(each)
        elif each.name.startswith(("CALL", "PRECALL")):
            self._call_by_count(each)
        elif each.name in _OLD_BINARY or each.name.startswith("INPLACE_"):
            self._binary(_OLD_BINARY.get(each.name, "?"))
        else:
            self._generic(each)
        return True

    def _generic(self, each: Instruction) -> None:
        """An instruction whose operands are read whole, and of whose results nothing is known."""
        if each.name in _PUSHES_ONE or each.effect > 0:
            self.stack += [UNKNOWN] * each.effect
            return
        for values in self._pop_many(1 - each.effect):
            self.reader.whole(values, self.line)
        self.stack.append(UNKNOWN)

    def _leave(self, each: Instruction) -> bool:
        if each.name == "RETURN_CONST":
            self.result = union(self.result, constant(each.value))
        elif each.name in ("RETURN_VALUE", "RETURN_GENERATOR") and each.name != "RETURN_GENERATOR":
            self.result = union(self.result, self._pop())
        elif each.name == "RETURN_GENERATOR":
            self._push(UNKNOWN)
            return True
        return False
