"""The calls of torch's operator database, as functions from tensors to tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import optree
import torch

Function = Callable[..., list[torch.Tensor]]

ARBITRARY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Entries whose results are uninitialized memory: only their shapes are compared."""

_SEARCHED = 100  # the most calls of an entry that are considered; some have thousands
_DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)


@attrs.frozen(eq=False)
class Case:
    """One call: a function from all its tensors to all tensors of its result.

    Args:
        label: the sample and its operands, for messages.
        function: the function.
        tensors: its arguments.
        asked: positions of the arguments that require a gradient in the database.
        values: whether the values of the results are compared, and not only their shapes.
        direct: the function without copies of its arguments, which it may write to; None if there is no such function.
    """

    label: str
    function: Function
    tensors: tuple[torch.Tensor, ...]
    asked: tuple[int, ...] = ()
    values: bool = True
    direct: Function | None = None

    def mapped(self, change: Callable[[Function], Function]) -> Case:
        """The case with `change` applied to its functions."""
        direct = None if self.direct is None else change(self.direct)
        return attrs.evolve(self, function=change(self.function), direct=direct)

    @property
    def is_dense(self) -> bool:
        """Whether no argument is sparse."""
        return all(tensor.layout is torch.strided for tensor in self.tensors)


def entries(pattern: str = "") -> list[Any]:
    """The entries (`OpInfo`) of the database whose full name contains `pattern`; `name$` asks for exactly that one."""
    from torch.testing._internal import common_methods_invocations as database  # takes seconds, and needs expecttest

    database.wrapper_set_seed = _without_seed  # type: ignore[attr-defined]  # a traced function must not seed
    exact = pattern.endswith("$")
    wanted = pattern.removesuffix("$")
    return [entry for entry in database.op_db if (wanted == full_name(entry) if exact else wanted in full_name(entry))]


def _without_seed(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces the database's wrapper of random operators, which seeds; the sweep itself seeds both of its runs."""
    return op(*args, **kwargs)


def full_name(entry: Any) -> str:
    """The name of an entry, with that of its variant."""
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else str(entry.name)


def cases(
    entry: Any, samples: int, backward: bool = False, lengths: bool = False, device: str = "cpu"
) -> Iterator[Case]:
    """The first `samples` calls of an entry in float64, or the first dtype that it supports.

    With `lengths`, only calls in which a dim of an operand has a length that no earlier call has are counted. With
    `backward`, the function also returns, by `torch.func.vjp`, the gradients of all floating operands, or of those that
    have one; the cotangents are further arguments. Calls without a floating operand or result are then left out.
    """
    for case in dense_cases(entry, samples, backward, lengths, device):
        if not backward:
            yield case
        elif entry.supports_autograd and is_differentiable(case):
            yield with_every_gradient(case)


def dense_cases(
    entry: Any, samples: int, differentiable: bool = False, lengths: bool = False, device: str = "cpu"
) -> Iterator[Case]:
    """The calls as in `cases`, without gradients; with `differentiable`, `Case.asked` is filled in."""
    supported = entry.supported_dtypes(device)
    dtype = next((dtype for dtype in (*_DTYPES, *sorted(supported, key=str)) if dtype in supported), None)
    if dtype is None:
        return
    torch.manual_seed(0)
    asked = differentiable and dtype in entry.supported_backward_dtypes(device)
    found = entry.sample_inputs(device, dtype, requires_grad=asked)
    dense = (_case(entry, sample, number) for number, sample in enumerate(found))
    dense = (case for case in itertools.islice(dense, _SEARCHED) if case.is_dense)
    yield from itertools.islice(_with_new_lengths(dense) if lengths else dense, samples)


def _with_new_lengths(found: Iterator[Case]) -> Iterator[Case]:
    seen: set[int] = set()
    for case in found:
        lengths = {length for tensor in case.tensors for length in tensor.shape}
        if not lengths <= seen:
            seen |= lengths
            yield case


def _case(entry: Any, sample: Any, number: int) -> Case:
    leaves, tree = optree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    at = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return direct(*(tensor.clone() for tensor in tensors))  # batch norms write to their statistics

    def direct(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = list(leaves)
        for position, tensor in zip(at, tensors, strict=True):
            given[position] = tensor
        first, args, kwargs = optree.tree_unflatten(tree, given)  # type: ignore[misc]
        result = entry.op(first, *args, **kwargs)
        return [leaf for leaf in optree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    tensors = tuple(leaves[position].detach() for position in at)
    asked = tuple(number for number, position in enumerate(at) if leaves[position].requires_grad)
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
    rest = ", ".join(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
    label = f"sample {number}: {shapes}{'; ' if rest else ''}{rest:.80}"
    return Case(label, function, tensors, asked, entry.name not in ARBITRARY, direct)


def with_every_gradient(case: Case) -> Case:
    """The case with the gradients of all floating operands, or, if some have none, of those of `Case.asked`."""
    floating = [position for position, tensor in enumerate(case.tensors) if has_gradient(tensor)]
    whole = _with_gradients(case, floating)
    try:
        whole.function(*whole.tensors)
    except RuntimeError:  # the statistics of a batch norm, the targets of some losses
        return _with_gradients(case, case.asked)
    return whole


def _with_gradients(case: Case, at: Sequence[int]) -> Case:
    """The case with the gradients of the operands at some positions."""
    outputs = case.function(*case.tensors)
    cotangents = tuple(torch.randn_like(output) for output in outputs if has_gradient(output))
    count = len(case.tensors)

    def differentiated(inner: Function) -> Function:
        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            def primal(*floating: torch.Tensor) -> Any:
                given = list(tensors[:count])
                for position, tensor in zip(at, floating, strict=True):
                    given[position] = tensor
                return tuple(output for output in inner(*given) if has_gradient(output))

            results, pullback, *_ = torch.func.vjp(primal, *(tensors[position] for position in at))
            return [*results, *pullback(tuple(tensors[count:]))]

        return function

    return attrs.evolve(case.mapped(differentiated), tensors=(*case.tensors, *cotangents))


def has_gradient(tensor: torch.Tensor) -> bool:
    """Whether a tensor may have a gradient: it is dense, and floating or complex."""
    return tensor.layout is torch.strided and (tensor.is_floating_point() or tensor.is_complex())


def is_differentiable(case: Case) -> bool:
    """Whether a case has a floating operand and a floating result."""
    return any(map(has_gradient, case.tensors)) and any(map(has_gradient, case.function(*case.tensors)))
