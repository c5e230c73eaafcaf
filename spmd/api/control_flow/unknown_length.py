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


def loop_while(call: str, cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    """Run `while_loop` under the name of the function that the user calls.

    Raises:
        TraceError: as of `while_loop`.
    """
    check_callable(call, [("cond_fun", cond_fun), ("body_fun", body_fun)])
    start = leaves_of(init_val, call, "init_val")

    def run(carry: Carry) -> Any:
        def condition(values: list[Tensor]) -> bool | Tensor:
            tested = called(cond_fun, carry.tree(values), call=call, name="cond_fun")
            return boolean_scalar(tested, call, "what cond_fun returns")

        def body(values: list[Tensor]) -> list[Tensor]:
            return carry.next(called(body_fun, carry.tree(values), call=call, name="body_fun"))

        if in_program():
            from spmd.tracing.loops import traced_while  # with the rules, which `import spmd` leaves out

            finals = traced_while(lambda values: torch.as_tensor(condition(values)), body, carry.values)
        else:
            finals = while_by_trips(condition, body, carry.values, call)
        return carry.tree(new_values(finals, carry.values))

    return settled(Carry.of(start, call, "body_fun", device_of(init_val)), run)
