"""What is swept: every public class of `torch.nn`, and every public function that torch's operator database lacks."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import attrs
import optree
import torch
from torch import nn

from proofs.nn_sweep import functions, layers, losses, recurrent
from proofs.nn_sweep.call import SEED, Call, call

Make = Callable[[], Call]

HANDMADE: Mapping[str, Sequence[Make]] = MappingProxyType(
    {
        **{f"nn.{name}": calls for part in (layers, losses, recurrent) for name, calls in part.CALLS.items()},
        **functions.CALLS,
    }
)
"""Handwritten calls, by the full name of a class or function."""

NOT_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "nn.Container": "deprecated name of Module",
        "nn.LinearCrossEntropyOptions": "options of LinearCrossEntropyLoss, not a module",
        "nn.RNNBase": "abstract: it has no forward",
        "nn.RNNCellBase": "abstract: it has no forward",
    }
)
"""Public classes of `torch.nn` that cannot be called, and why."""

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "nn.AdaptiveLogSoftmaxWithLoss": "selects the rows of each cluster of targets: shapes that depend on values",
        "nn.BatchNorm1d": "only `momentum=None`, which reads the number of batches as a Python number",
        "nn.CTCLoss": "lengths decide the shape of what is saved for the gradient, even if they are numbers",
        "nn.GaussianNLLLoss": "branches on `torch.any(var < 0)`: call the formula, or check outside",
    }
)
"""Why some calls of these cannot be traced: torch's own module has control flow or shapes that depend on values."""

HELPERS = frozenset(
    {
        "Optional",
        "assert_int_or_pair",
        "boolean_dispatch",
        "handle_torch_function",
        "has_torch_function",
        "has_torch_function_unary",
        "has_torch_function_variadic",
    }
)
"""Names that `torch.nn.functional` imports for its own implementation."""

_NAMESPACES: Mapping[str, ModuleType] = MappingProxyType(
    {"nn.functional": nn.functional, "linalg": torch.linalg, "fft": torch.fft, "special": torch.special}
)


@attrs.frozen(eq=False)
class Subject:
    """A class of modules, or a function.

    Args:
        name: its name below `torch`.
        is_module: whether it is a class of modules.
        handmade: handwritten calls.
        database: its entry (`ModuleInfo`) in torch's module database.
    """

    name: str
    is_module: bool
    handmade: Sequence[Make] = ()
    database: Any = None

    def calls(self, training: bool, most: int) -> Iterator[tuple[str, Call]]:
        """Its calls with labels: a fixed sample of at most `most` calls from the database, and all handwritten ones."""
        torch.manual_seed(SEED)
        if self.database is not None:
            found = self.database.module_inputs_func(
                self.database, device="cpu", dtype=torch.float64, requires_grad=False, training=training
            )
            for number, sample in _sample(list(found), most):
                yield _labelled(f"sample {number}", _of_database(self.database.module_cls, sample))
        for number, make in enumerate(self.handmade):
            torch.manual_seed(SEED + number)
            yield _labelled(f"call {number}", make())


def subjects(pattern: str = "") -> list[Subject]:
    """All subjects whose name contains `pattern`; `name$` asks for exactly that one."""
    from torch.testing._internal.common_modules import module_db  # takes seconds, and needs expecttest

    exact, wanted = pattern.endswith("$"), pattern.removesuffix("$")
    database = {f"nn.{info.module_cls.__name__}": info for info in module_db}
    names = [*(name for name in module_names() if name not in NOT_MODULES), *missing_functions()]
    return [
        Subject(name, name in module_names(), HANDMADE.get(name, ()), database.get(name))
        for name in names
        if (wanted == name if exact else wanted in name)
    ]


def module_names() -> list[str]:
    """The public classes of `torch.nn`."""
    return [f"nn.{name}" for name in sorted(nn.modules.__all__)]


def missing_functions() -> list[str]:
    """The public functions of four namespaces that are neither an entry of torch's operator database nor an alias."""
    from torch.testing._internal.common_methods_invocations import op_db

    known = {name for entry in op_db for name in (entry.name, *(alias.name for alias in entry.aliases))}
    return [
        f"{prefix}.{name}"
        for prefix, namespace in _NAMESPACES.items()
        for name, found in sorted(vars(namespace).items())
        if callable(found) and not inspect.isclass(found) and not name.startswith("_")
        if name not in HELPERS and f"{prefix}.{name}" not in known
    ]


def _sample(found: Sequence[Any], most: int) -> list[tuple[int, Any]]:
    numbers = list(range(len(found)))
    if len(found) > most:
        numbers = sorted(random.Random(SEED).sample(numbers, most))
    return [(number, found[number]) for number in numbers]


def _of_database(module: type[nn.Module], sample: Any) -> Call:
    made, given = sample.constructor_input, sample.forward_input
    return call(module(*made.args, **made.kwargs), *given.args, **given.kwargs)


def _labelled(label: str, of: Call) -> tuple[str, Call]:
    leaves = optree.tree_leaves((of.args, dict(of.kwargs)))
    shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor))
    rest = ", ".join(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
    what = " ".join(str(of.function).split()) if isinstance(of.function, nn.Module) else ""
    return f"{label}: {what:.80}{': ' if what else ''}{shapes}{'; ' if rest else ''}{rest:.80}", of
