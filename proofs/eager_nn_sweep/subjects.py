"""What is swept: modules, functions, initialisers, optimizers, distributions and tools of `torch.nn.utils`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import attrs
import torch
from torch import nn

from proofs.eager_nn_sweep import distributions, initializers, optimizers, tools
from proofs.nn_sweep.call import SEED, Call
from proofs.nn_sweep.subjects import Make
from proofs.nn_sweep.subjects import subjects as modules_and_functions
from proofs.op_sweep.cases import dense_cases, full_name

HANDMADE: Mapping[str, Sequence[Make]] = MappingProxyType(
    {**initializers.CALLS, **optimizers.CALLS, **distributions.CALLS, **tools.CALLS}
)
"""Handwritten calls by full name."""

NOT_CALLED: Mapping[str, str] = MappingProxyType({**initializers.NOT_CALLED, **optimizers.NOT_CALLED,
                                                  **distributions.NOT_CALLED, **tools.NOT_CALLED})  # fmt: skip
"""Public names that are not swept, and why."""


class Calls(Protocol):
    """A name with calls."""

    @property
    def name(self) -> str: ...

    def calls(self, training: bool, most: int) -> Iterator[tuple[str, Call]]:
        """Its calls with labels, at most `most` of a database and all handwritten ones."""


@attrs.frozen(eq=False)
class Handmade:
    """A name with handwritten calls."""

    name: str
    made: Sequence[Make]

    def calls(self, training: bool, most: int) -> Iterator[tuple[str, Call]]:
        """All of its calls."""
        for number, make in enumerate(self.made):
            torch.manual_seed(SEED + number)
            yield f"call {number}", make()


@attrs.frozen(eq=False)
class Entry:
    """An entry of torch's operator database."""

    name: str
    entry: Any

    def calls(self, training: bool, most: int) -> Iterator[tuple[str, Call]]:
        """The first calls of the entry that have dense tensors."""
        for case in dense_cases(self.entry, most):
            yield case.label, Call(case.function, case.tensors)


def subjects(pattern: str = "") -> list[Calls]:
    """All subjects whose name contains `pattern`; `name$` asks for exactly that one."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    exact, wanted = pattern.endswith("$"), pattern.removesuffix("$")
    every: list[Calls] = [
        *(one for one in modules_and_functions() if one.name.startswith("nn.")),
        *(Entry(full_name(entry), entry) for entry in op_db if entry.name.startswith("nn.functional.")),
        *(Handmade(name, made) for name, made in HANDMADE.items()),
    ]
    return [one for one in every if (wanted == one.name if exact else wanted in one.name)]


def public_names() -> set[str]:
    """The public initialisers, optimizers, distributions and tools of torch."""
    rnn, stochastic = nn.utils.rnn, torch.distributions.Distribution
    prune, parametrize = nn.utils.prune, nn.utils.parametrize
    return {
        *(f"nn.init.{name}" for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")),
        *(f"optim.{name}" for name, found in vars(torch.optim).items() if _is_class(found, torch.optim.Optimizer)),
        *(f"distributions.{name}" for name in torch.distributions.__all__
          if _is_class(getattr(torch.distributions, name), stochastic)),
        *(f"nn.utils.{name}" for name in nn.utils.__all__ if callable(getattr(nn.utils, name))),
        *(f"nn.utils.rnn.{name}" for name in rnn.__all__ if not isinstance(getattr(rnn, name), type)),
        *(f"nn.utils.prune.{name}" for name, found in vars(prune).items() if _is_function(found, prune)),
        *(f"nn.utils.parametrize.{name}" for name, found in vars(parametrize).items()
          if _is_function(found, parametrize)),
        *(f"nn.utils.parametrizations.{name}" for name in nn.utils.parametrizations.__all__),
    }  # fmt: skip


def _is_class(found: Any, base: type) -> bool:
    return isinstance(found, type) and issubclass(found, base) and found is not base


def _is_function(found: Any, module: Any) -> bool:
    name = getattr(found, "__name__", "_")
    return callable(found) and not isinstance(found, type) and found.__module__ == module.__name__ and name[0] != "_"
