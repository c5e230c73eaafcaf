"""One call on plain tensors or on DTensors: forward, backward and a step of an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import optree
import torch
from torch import nn

from proofs.nn_sweep.call import Call, Role, Trial
from proofs.op_sweep.cases import has_gradient
from proofs.op_sweep.eager import cotangent
from proofs.op_sweep.expected import seed

Place = Callable[[int, torch.Tensor], torch.Tensor]
"""Places a tensor by its number in the trial: parameters, buffers, inputs."""


@attrs.frozen(eq=False)
class Step:
    """A call, and the numbers of its tensors that have gradients.

    Args:
        call: the call.
        trial: the same as a function, for the roles of its tensors.
        asked: the numbers of the tensors whose gradients are compared.
    """

    call: Call
    trial: Trial
    asked: frozenset[int]

    @classmethod
    def of(cls, call: Call, trial: Trial) -> Step:
        """The call with gradients of all its parameters and inputs that plain torch can differentiate."""
        tensors = enumerate(zip(trial.case.tensors, trial.roles, strict=True))
        floating = [n for n, (tensor, role) in tensors if role is not Role.BUFFER and has_gradient(tensor)]
        if _runs(step := cls(call, trial, frozenset(floating))):
            return step
        alone = [n for n in floating if _runs(cls(call, trial, frozenset([n])))]
        return cls(call, trial, frozenset(alone))

    def run(self, place: Place) -> list[torch.Tensor]:
        """The results, the buffers, the gradients, and the parameters after a step."""
        tensors = [place(number, tensor) for number, tensor in enumerate(self.trial.case.tensors)]
        function = self.call.function
        function = _with_tensors(function, tensors, self.asked) if isinstance(function, nn.Module) else function
        state = [*function.parameters(), *function.buffers()] if isinstance(function, nn.Module) else []
        leaves = [
            *state,
            *(tensor.requires_grad_(n in self.asked) for n, tensor in enumerate(tensors) if n >= len(state)),
        ]
        args, kwargs = self._arguments(leaves[len(state) :])
        seed()
        results = _tensors(function(*args, **kwargs))
        ends = [result for result in results if result.requires_grad]
        if ends:
            torch.autograd.backward(ends, [cotangent(end) for end in ends])
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        found = [*(result.detach().clone() for result in (*results, *state)), *gradients]
        if parameters := [leaf for leaf in state if leaf.grad is not None]:
            torch.optim.SGD(parameters, lr=0.1, momentum=0.9).step()
        return [*found, *(parameter.detach() for parameter in parameters)]

    def _arguments(self, inputs: Sequence[torch.Tensor]) -> Any:
        leaves, tree = optree.tree_flatten((self.call.args, dict(self.call.kwargs)))  # type: ignore[var-annotated]
        given = iter(inputs)
        return optree.tree_unflatten(tree, [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def _runs(step: Step) -> bool:
    try:
        step.run(lambda _, tensor: tensor.clone())
    except Exception:  # plain torch has no derivative for a target, for example
        return False
    return True


def _with_tensors(module: nn.Module, tensors: Sequence[torch.Tensor], asked: frozenset[int]) -> nn.Module:
    """A copy of a module with other parameters and buffers, in the order of `named_parameters` and `named_buffers`."""
    module = copy.deepcopy(module)
    parameters, buffers = list(module.parameters()), list(module.buffers())
    numbers = {id(tensor): n for n, tensor in enumerate((*parameters, *buffers))}
    made = {n: nn.Parameter(tensors[n], requires_grad=n in asked) for n in range(len(parameters))}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                setattr(part, name, made[numbers[id(parameter)]])
        for name, buffer in part._buffers.items():
            if buffer is not None:
                setattr(part, name, tensors[numbers[id(buffer)]])
    return module


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
