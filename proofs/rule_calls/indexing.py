"""Small calls of the operators that read and write at positions."""

from __future__ import annotations

import torch

from proofs.rule_calls.draws import Calls, Draws, call

aten = torch.ops.aten
_draws = Draws(3)
_THREE = torch.tensor([True, False, True, True])
f, i, b = _draws.f, _draws.i, _draws.b


def written(reduce: tuple[str, ...], **kwargs: bool) -> Calls:
    """Calls that write along either dim, at all positions of the other dim or at some of them."""
    return [
        made
        for kind in reduce
        for made in (
            call(f(4, 5), 1, i(5, 4, 6), f(4, 6), reduce=kind, **kwargs),
            call(f(4, 5), 0, i(4, 2, 3), f(3, 5), reduce=kind, **kwargs),
        )
    ]


def reduced(reduce: tuple[str, ...], **kwargs: bool) -> Calls:
    return [call(f(4, 5), 1, i(5, 4, 6), f(4, 6), kind, **kwargs) for kind in reduce]


INDEXING = {
    aten.index.Tensor: [
        call(f(4, 5), [i(4, 3)]),
        call(f(4, 5, 3), [None, i(5, 4, 2), i(3, 2)]),
        call(f(4, 5, 3), [i(4, 2), None, i(3, 2)]),
        call(f(7, 2), [torch.tensor([[-1, 3]])]),
        call(b(7, 2), [torch.tensor([5])]),
    ],
    aten.index_put.default: [
        call(f(4, 5), [torch.tensor([1, 3, 0])], f(3, 5)),
        call(f(4, 5), [torch.tensor([1, 1, 0])], f(5), True),
        call(f(7, 2), [torch.tensor([-1, 3])], f(1), True),
        call(f(4, 5, 3), [None, torch.tensor([1, 3])], f(4, 2, 3), True),
        call(f(4, 5), [torch.tensor([1, 3]), torch.tensor([2, 2])], f(2)),
        call(f(4, 5), [b(4, 5)], f()),
        call(f(4, 5), [b(4, 5)], f(1), True),
        call(f(4, 5, 3), [None, b(5, 3)], f(4, 1)),
        call(f(4, 5, 3), [None, b(5)], f(3)),
        call(f(4, 5, 3), [b(4)], f(5, 1)),
        call(f(4, 5), [_THREE], f(3, 5)),
        call(f(4, 5, 2), [_THREE, None, torch.tensor([0, 1, 0])], f(3, 5)),
        call(f(4, 5, 2), [_THREE, torch.tensor([[2], [4]])], f(2, 3, 2)),
        call(f(4, 4), [_THREE, _THREE], f(3)),
    ],
    aten.index_select.default: [call(f(4, 5), 1, i(5, 4)), call(f(4, 5), 0, i(4, 7))],
    aten.index_add.default: [call(f(4, 5), 0, i(4, 6), f(6, 5)), call(f(4, 5), 1, i(5, 3), f(4, 3), alpha=-2.0)],
    aten.gather.default: [
        call(f(4, 5), 1, i(5, 4, 3)),
        call(f(4, 5), 0, i(4, 2, 3)),
        call(f(5), 0, i(5, 4)),
        call(f(5), 0, i(5, 2, 0)),
    ],
    aten.scatter.src: [
        call(f(4, 5), 1, torch.tensor([[0, 3], [1, 2], [4, 0], [2, 3]]), f(4, 2)),
        call(f(4, 5), 0, torch.tensor([[0, 3, 1]]), f(2, 5)),
    ],
    aten.scatter.value: [call(f(4, 5), 1, i(5, 4, 2), 2.0), call(f(4, 5), 1, i(5, 4, 2), 0)],
    aten.scatter_add.default: [call(f(4, 5), 1, i(5, 4, 6), f(4, 6)), call(f(4, 5), 0, i(4, 2, 3), f(3, 5))],
    aten.index_reduce.default: [
        call(f(4, 5), 0, i(4, 6), f(6, 5), kind, include_self=whole)
        for kind in ("prod", "mean", "amax", "amin")
        for whole in (True, False)
    ],
    aten.scatter.reduce: written(("add", "multiply")),
    aten.scatter.value_reduce: [call(f(4, 5), 1, i(5, 4, 6), 2.0, reduce=kind) for kind in ("add", "multiply")],
    aten.scatter_reduce.two: [
        *reduced(("sum", "prod", "mean", "amax", "amin")),
        *reduced(("sum", "mean", "amax"), include_self=False),
        call(f(4, 5), 0, i(4, 2, 3), f(3, 5), "sum"),
        call(f(5), 0, i(5, 7), f(7), "amin"),
        call(f(), 0, i(1), f(), "sum"),
    ],
    aten.take.default: [call(f(4, 5), i(20, 3, 2)), call(f(5), i(5)), call(f(3, 2), i(6, 7))],
    aten.put.default: [
        call(f(4, 5), torch.tensor([3, 19, 7, 0]), f(4)),
        call(f(4, 5), i(20, 3, 2), f(3, 2), True),
        call(f(4, 5), i(20, 6), f(3, 2), True),
    ],
}
