"""The position of a run: what it needs, beside its tensors, to go on as if it had not stopped."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from spmd.core.documents import Fields, MapOf, schema_violation
from spmd.core.documents import parse as parse_json
from spmd.errors import CheckpointError

_SCHEMA = Fields({"step": int, "generators": MapOf(str), "processes": int})

_PYTHON = "python"
"""The name of the generator of the module `random`."""


def _step(position: Position, attribute: object, step: object) -> None:
    if type(step) is not int or step < 0:
        raise CheckpointError(f"The step of a Position must be a number of steps from 0 (got {step!r}).")


def _plain(data: Any) -> Any:
    """The data as it will be loaded."""
    try:
        return json.loads(json.dumps(data, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The data of a Position must be None, numbers, text, and lists and dicts of them (got {data!r:.200}: "
            f"{error})."
        ) from error


@attrs.frozen
class Position:
    """The position of a run, as a leaf of the tree that is saved.

    Its step is the same on all ranks. The data and the generators are those of each process; where they differ between
    processes, each saves and loads its own, and a job of another size cannot load them.

    Args:
        step: the number of steps taken.
        data: the position in the data: numbers, text, None, and lists and dicts of them, as in the `state_dict()` of a
            data loader.
        generators: the states of random generators, by name; see `now`.

    Raises:
        CheckpointError: a step or data of another kind.

    >>> import tempfile
    >>> from spmd.checkpoint import load, save
    >>> position = Position.now(100, {"epoch": 2, "batch": 17})
    >>> drawn = torch.rand(3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"position": position}, folder)
    ...     loaded = load(folder, {"position": Position()})["position"]
    >>> loaded.step, loaded.data
    (100, {'epoch': 2, 'batch': 17})
    >>> loaded.restore()
    >>> drawn.equal(torch.rand(3))
    True
    """

    step: int = attrs.field(default=0, validator=_step)
    data: object = attrs.field(default=None, converter=_plain)
    generators: Mapping[str, str] = attrs.field(factory=dict, repr=lambda states: repr(list(states)))

    @classmethod
    def now(cls, step: int, data: Any = None, *, generators: Mapping[str, torch.Generator] | None = None) -> Position:
        """The position with the present states of torch's default generators, of Python's `random`, and of others.

        Args:
            step: the number of steps taken.
            data: the position in the data.
            generators: generators of the user's own, by name.
        """
        states = {name: _state(generator) for name, generator in _generators(generators).items()}
        return cls(step, data, {**states, _PYTHON: json.dumps(random.getstate())})

    def restore(self, *, generators: Mapping[str, torch.Generator] | None = None) -> None:
        """Set this process's generators to the states of this position.

        Args:
            generators: the user's own, by the names that they had in `now`.

        Raises:
            CheckpointError: this process has other generators than those of the position, or a state is malformed.
        """
        present = _generators(generators)
        saved = self.generators.keys() - {_PYTHON}
        if saved != present.keys():
            raise CheckpointError(
                f"The position has states of the generators {_listed(saved)}, and here are {_listed(present.keys())}. "
                "Pass restore(generators=...) those that were given to Position.now, on a device of the same kind."
            )
        try:
            for name, generator in present.items():
                state = list(bytes.fromhex(self.generators[name]))
                generator.set_state(torch.tensor(state, dtype=torch.uint8))
            if _PYTHON in self.generators:
                version, internal, gauss = json.loads(self.generators[_PYTHON])
                random.setstate((version, tuple(internal), gauss))
        except (RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"The state of a generator cannot be restored: {error}") from error

    def to_text(self, processes: int) -> str:
        """The position as a text that a checkpoint stores, with the number of processes of the job."""
        return json.dumps({**attrs.asdict(self, recurse=False), "processes": processes})


def parse(text: Any) -> tuple[Position, int]:
    """The position that a checkpoint stores, and the number of processes of the job that saved it.

    Raises:
        CheckpointError: it is no position.
    """
    try:
        document = parse_json(text)
        data = document.pop("data")
        wrong = schema_violation(document, _SCHEMA)
    except (AttributeError, KeyError, TypeError, ValueError):
        wrong = "it has no step and no data"
    if wrong is not None:
        raise CheckpointError(f"it is not a Position: {wrong}")
    return Position(document["step"], data, document["generators"]), document["processes"]


def _generators(own: Mapping[str, torch.Generator] | None) -> dict[str, torch.Generator]:
    """Torch's default generators that this process uses, and the user's own."""
    defaults = {"torch": torch.default_generator}
    if torch.cuda.is_initialized():
        defaults["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    taken = (own or {}).keys() & {*defaults, _PYTHON}
    if taken:
        raise CheckpointError(f"A generator cannot be named {min(taken)!r}, as a default one is. Choose another name.")
    return {**defaults, **(own or {})}


def _state(generator: torch.Generator) -> str:
    return bytes(generator.get_state().tolist()).hex()


def _listed(names: Any) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
