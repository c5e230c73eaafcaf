"""In which order a rank launches its collectives, and which ones it joins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spmd.collectives.distributed.bucket import Bucket
from spmd.collectives.transport.exchange import Exchange
from spmd.core.spec import TensorMeta
from spmd.ir.comm import Comm
from spmd.ir.graph import Annotations, Graph, Operation, Value
from spmd.lowering.launches import Wait, split_launches

VIEW = torch.ops.aten.view.default


class Program:
    """A program under construction; each collective has a launch."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.operations: list[Operation] = []

    def input(self) -> Value:
        self.inputs.append(Value(f"x{len(self.inputs)}", TensorMeta((4,), torch.float32)))
        return self.inputs[-1]

    def call(self, op: Any, *args: Any, comm: Comm | None = None) -> Value:
        result = Value(f"v{len(self.operations)}", TensorMeta((4,), torch.float32))
        self.operations.append(Operation(op, args, {}, (result,), annotations=Annotations(comm)))
        return result

    def collective(self, operand: Value, launch: int) -> Value:
        op = Exchange(lambda x: x, (), lambda x: x, lambda x: x, sends=(4,), receives=(4,))
        return self.call(op, operand, comm=Comm("all_reduce", ("x",), 4.0, 0.0, "", None, launch))

    def view(self, operand: Value) -> Value:
        return self.call(VIEW, operand, [4])

    def use(self, *operands: Value) -> Value:
        return self.call(sum, *operands)

    def ordered(self, *outputs: Value, window: float = 0.0) -> list[list[Value]]:
        """What is there after each operation; a launch as its results when it has started."""
        graph = Graph(tuple(self.inputs), (), tuple(self.operations), outputs).verify()
        split = split_launches(graph, window).operations
        waits = {operation.args[0]: operation for operation in split if isinstance(operation.op, Wait)}
        shown = [waits.get(o.tensors[0], o) for o in split if o not in waits.values()]
        return [list(operation.tensors) for operation in shown]


def test_a_bucket_stands_where_the_last_of_its_collectives_stood():
    program = Program()
    x = program.input()
    a = program.use(x)
    first = program.collective(a, 0)
    b = program.use(x)
    second = program.collective(b, 0)
    c = program.use(first, second)
    assert [[a], [b], [first, second], [c]] == program.ordered(c)


def test_a_bucket_stands_before_the_first_use_of_a_result():
    program = Program()
    x, y = program.input(), program.input()
    first = program.collective(x, 0)
    a = program.use(first)
    second = program.collective(y, 0)
    b = program.use(a, second)
    assert [[first, second], [a], [b]] == program.ordered(b)


def test_launches_keep_the_order_of_the_plan():
    program = Program()
    x, y = program.input(), program.input()
    first = program.collective(x, 1)
    second = program.collective(y, 0)
    a = program.use(first, second)
    assert [[second], [first], [a]] == program.ordered(a)


def test_views_of_results_wait_for_their_first_use():
    """Also views of views, whose user stands after another user of the first one."""
    program = Program()
    x = program.input()
    gathered = program.collective(x, 0)
    first = program.view(gathered)
    second = program.view(first)
    a = program.use(x)
    b = program.use(a, first)
    c = program.use(b, second)
    assert [[gathered], [a], [first], [b], [second], [c]] == program.ordered(c)


def test_views_of_results_do_not_keep_collectives_apart():
    program = Program()
    x = program.input()
    first = program.collective(x, 0)
    view = program.view(first)
    second = program.collective(program.use(x), 0)
    c = program.use(view, second)
    made = program.operations[2].tensors[0]
    assert [[made], [first, second], [view], [c]] == program.ordered(c)


def test_what_waits_for_a_bucket_moves_behind_it():
    """As on a rank whose program has an operation where others have a view."""
    program = Program()
    x = program.input()
    first = program.collective(x, 0)
    a = program.use(first)
    second = program.collective(program.use(x), 0)
    b = program.use(a, second)
    made = program.operations[2].tensors[0]
    assert [[made], [first, second], [a], [b]] == program.ordered(b)


def test_results_that_are_not_used_are_launched_and_made_too():
    program = Program()
    x = program.input()
    first = program.collective(x, 0)
    view = program.view(first)
    assert [[first], [view]] == program.ordered(x)


@pytest.mark.parametrize("shapes", [[(2, 3), (4,)], [(0,), (3, 0)], [(), (5,)]])
def test_a_bucket_has_the_parts_of_its_collectives(shapes: list[tuple[int, ...]]) -> None:
    """Results are those of each collective, and share the memory that was received."""

    def part(shape: tuple[int, ...]) -> Exchange:
        numel = torch.Size(shape).numel()
        return Exchange(
            lambda x: 2 * x, (), lambda x: x.reshape(-1), lambda x: x.view(shape), sends=(numel,), receives=(numel,)
        )

    operands = [torch.rand(shape) for shape in shapes]
    bucket = Bucket.of([part(shape) for shape in shapes])
    pending = bucket.start(*operands)
    assert pending.numel() == sum(x.numel() for x in operands)
    results = bucket.finish(pending)
    for x, result in zip(operands, results, strict=True):
        assert torch.equal(2 * x, result)


def test_a_bucket_has_the_parts_of_exchanges_for_each_rank():
    """Unequal ones, too: each rank gets its parts of all tensors, and sends its own."""

    def part(sends: tuple[int, ...], receives: tuple[int, ...]) -> Exchange:
        return Exchange(sent, ("group",), ravel, ravel, sends=sends, receives=receives, takes_sizes=True)

    def sent(buffer: torch.Tensor, receives: list[int], sends: list[int], group: str) -> torch.Tensor:
        assert ([3, 3], [3, 4], "group") == (receives, sends, group)
        assert [0, 10, 11, 1, 2, 12, 13] == buffer.tolist()
        return torch.tensor([20, 21, 30, 22, 31, 32])

    ravel = torch.ravel
    bucket = Bucket.of([part((1, 2), (2, 1)), part((2, 2), (1, 2))])
    assert (7, 6) == (sum(bucket.sends), sum(bucket.receives))
    first, second = bucket.finish(bucket.start(torch.arange(3), torch.arange(10, 14)))
    assert ([20, 21, 22], [30, 31, 32]) == (first.tolist(), second.tolist())
