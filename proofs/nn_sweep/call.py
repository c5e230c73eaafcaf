"""One call of a module or function, as a function of its tensors, each with its role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import attrs
import optree
import torch
from torch import nn

from proofs.op_sweep.cases import Case, has_gradient

SEED = 42
"""The seed of every call, and of the parameters and inputs that are drawn before it."""


class Role(Enum):
    """What a tensor is to a call."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    COTANGENT = "cotangent"


@attrs.frozen(eq=False)
class Call:
    """One call.

    Args:
        function: a module, or a function.
        args, kwargs: pytrees with tensors in them.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = {}


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """A call with these arguments; a module is converted to float64, and a lazy one gets its parameters."""
    if isinstance(function, nn.Module):
        function = function.double()
        if any(map(nn.parameter.is_lazy, function.parameters())):
            function(*args, **kwargs)
    return Call(function, args, kwargs)


@attrs.frozen(eq=False)
class Trial:
    """A call as a function of tensors alone, and the role of each tensor."""

    case: Case
    roles: tuple[Role, ...]


def trial(of: Call, label: str, *, training: bool, backward: bool, dtype: torch.dtype = torch.float64) -> Trial | None:
    """A call as a function from all its tensors to the tensors of its result and its updated buffers.

    Args:
        of: the call.
        label: for messages.
        training: the mode of a module.
        backward: also return the gradients of floating parameters and inputs, by `torch.func.vjp`; the cotangents are
            further arguments.
        dtype: replaces float64; some operators, such as LSTMs, run other kernels in float32.

    Returns:
        The trial; None if `backward` is set and there is no gradient.
    """
    if isinstance(of.function, nn.Module):
        of.function.train(training)
    flat = _Flat.of(of, dtype)
    found = Trial(Case(label, lambda *tensors: list(flat(*tensors)), flat.tensors), flat.roles)
    return _with_every_gradient(flat, found) if backward else found


@attrs.frozen(eq=False)
class _Flat:
    """A call as a function of its tensors: parameters, buffers, inputs."""

    function: Callable[..., Any]
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    roles: tuple[Role, ...]
    leaves: tuple[Any, ...]
    tree: Any
    written: frozenset[str]

    @classmethod
    def of(cls, call: Call, dtype: torch.dtype) -> _Flat:
        module = call.function if isinstance(call.function, nn.Module) else nn.Module()
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        leaves, tree = optree.tree_flatten((call.args, dict(call.kwargs)))  # type: ignore[var-annotated]
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        tensors = tuple(
            tensor.detach().to(dtype if tensor.dtype == torch.float64 else tensor.dtype)
            for tensor in (*parameters.values(), *buffers.values(), *inputs)
        )
        roles = (Role.PARAMETER,) * len(parameters) + (Role.BUFFER,) * len(buffers) + (Role.INPUT,) * len(inputs)
        written = frozenset(buffers) | _written_parameters(call)
        return cls(call.function, (*parameters, *buffers), tensors, roles, tuple(leaves), tree, written)

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        count = len(self.names)
        state = {
            name: tensor.clone() if name in self.written else tensor
            for name, tensor in zip(self.names, tensors[:count], strict=True)
        }
        inputs = iter(tensors[count:])
        leaves = [next(inputs) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = optree.tree_unflatten(self.tree, leaves)  # type: ignore[misc]
        if isinstance(self.function, nn.Module):
            result = torch.func.functional_call(self.function, state, args, kwargs)
        else:
            result = self.function(*args, **kwargs)
        results = [leaf for leaf in optree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return [*results, *(state[name] for name in self.names if name in self.written)]


def _written_parameters(call: Call) -> frozenset[str]:
    """The parameters that a call writes to, as embeddings with `max_norm` do."""
    if not isinstance(call.function, nn.Module):
        return frozenset()
    before = {name: tensor._version for name, tensor in call.function.named_parameters()}
    kept = {name: tensor.detach().clone() for name, tensor in call.function.state_dict().items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            call.function(*call.args, **call.kwargs)
        except Exception:  # that is for the sweep to find
            return frozenset()
    found = {name for name, tensor in call.function.named_parameters() if tensor._version != before[name]}
    call.function.load_state_dict(kept)
    return frozenset(found)


def _with_every_gradient(flat: _Flat, found: Trial) -> Trial | None:
    """The trial with the gradients of all floating parameters and inputs that plain torch can differentiate."""
    wanted = [
        position
        for position, (role, tensor) in enumerate(zip(found.roles, flat.tensors, strict=True))
        if role is not Role.BUFFER and has_gradient(tensor)
    ]
    whole = _with_gradients(flat, found, wanted)
    if whole is None or _failure(whole) is None:
        return whole
    alone = {position: _failure(_with_gradients(flat, found, [position])) for position in wanted}
    differentiable = [position for position, failure in alone.items() if failure is None]
    if not differentiable:
        raise _failure(whole) or RuntimeError("no gradient")
    return _with_gradients(flat, found, differentiable)


def _failure(found: Trial | None) -> Exception | None:
    """The error of plain torch, if it fails: for example "the derivative for 'target' is not implemented"."""
    try:
        if found is not None:
            found.case.function(*found.case.tensors)
    except RuntimeError as error:
        return error
    return None


def _with_gradients(flat: _Flat, found: Trial, at: Sequence[int]) -> Trial | None:
    torch.manual_seed(SEED)
    outputs = flat(*flat.tensors)
    results = len(outputs) - len(flat.written)
    cotangents = tuple(torch.randn_like(output) for output in outputs[:results] if has_gradient(output))
    if not at or not cotangents:
        return None
    count = len(flat.tensors)

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        def primal(*floating: torch.Tensor) -> Any:
            given = list(tensors[:count])
            for position, tensor in zip(at, floating, strict=True):
                given[position] = tensor
            outputs = flat(*given)
            differentiated = [output for output in outputs[:results] if has_gradient(output)]
            rest = [output for output in outputs[:results] if not has_gradient(output)]
            return tuple(differentiated), [*rest, *outputs[results:]]

        outputs, pullback, *aux = torch.func.vjp(primal, *(tensors[position] for position in at), has_aux=True)
        return [*outputs, *aux[0], *pullback(tuple(tensors[count:]))]

    case = Case(found.case.label, function, (*flat.tensors, *cotangents))
    return Trial(case, found.roles + (Role.COTANGENT,) * len(cotangents))
