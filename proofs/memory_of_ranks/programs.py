"""All programs of the proof, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from proofs.memory_of_ranks.examples import EXAMPLES
from proofs.memory_of_ranks.program import Program
from proofs.memory_of_ranks.small import SMALL

PROGRAMS: Mapping[str, Program] = MappingProxyType({**EXAMPLES, **SMALL})
