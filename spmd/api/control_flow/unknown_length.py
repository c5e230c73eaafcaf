"""The loop whose length is data, behind `while_loop` and `fori_loop`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spmd.api.control_flow.carry import Carry, settled
from spmd.api.control_flow.leaves import check_callable, device_of, leaves_of
from spmd.api.control_flow.new_values import new_values
from spmd.api.control_flow.place import in_program
from spmd.api.control_flow.predicates import boolean_scalar
from spmd.api.control_flow.trips import while_by_trips
from spmd.api.control_flow.unwritten import called
from spmd.tracing.draw_scopes import TripCounter


def loop_while(call: str, cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    """Run `while_loop` under the name of the function that the user calls.

    Raises:
        TraceError: as of `while_loop`.
    """
    check_callable(call, [("cond_fun", cond_fun), ("body_fun", body_fun)])
    start, counter = leaves_of(init_val, call, "init_val"), TripCounter()

    def run(carry: Carry) -> Any:
        init = [*carry.values, *counter.start]
        length = len(carry.values)

        def condition(values: list[Tensor]) -> bool | Tensor:
            with counter.scope(values[length:], 0):
                tested = called(cond_fun, carry.tree(values[:length]), call=call, name="cond_fun")
            return boolean_scalar(tested, call, "what cond_fun returns")

        def body(values: list[Tensor]) -> list[Tensor]:
            with counter.scope(values[length:], 1):
                found = carry.next(called(body_fun, carry.tree(values[:length]), call=call, name="body_fun"))
            return [*found, *(count + 1 for count in values[length:])]

        if in_program():
            from spmd.tracing.loops import traced_while  # with the rules, which `import spmd` leaves out

            finals = traced_while(lambda values: torch.as_tensor(condition(values)), body, init)
        else:
            finals = while_by_trips(condition, body, init, call)
        return carry.tree(new_values(finals[:length], carry.values))

    return settled(Carry.of(start, call, "body_fun", device_of(init_val)), run)
