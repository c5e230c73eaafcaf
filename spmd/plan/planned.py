"""What the modules that read a finished plan see of it; `Plan` itself is above them, since it offers what they find."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph, Operation, Value
from spmd.plan.causes import Cause
from spmd.plan.comm import Comm
from spmd.plan.layout import Layout
from spmd.plan.memory.peak import Memory
from spmd.plan.request import Request
from spmd.rules.strategy import LogicalShape, Strategy


class Planned(Protocol):
    """A finished plan; `Plan` says what its parts are."""

    @property
    def request(self) -> Request: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def graph(self) -> Graph: ...

    @property
    def logical(self) -> Mapping[Value, LogicalShape]: ...

    @property
    def specs(self) -> Mapping[Value, DTensorSpec]: ...

    @property
    def strategies(self) -> Mapping[Operation, Mapping[str, Strategy]]: ...

    @property
    def fallbacks(self) -> tuple[Operation, ...]: ...

    @property
    def gap(self) -> float: ...

    @property
    def seconds(self) -> float: ...

    @property
    def comms(self) -> tuple[Comm, ...]: ...

    @property
    def memory(self) -> Memory: ...

    @property
    def order(self) -> tuple[str, ...]: ...

    @property
    def causes(self) -> Mapping[Operation, Cause]: ...

    def layout(self, value: Value) -> Layout: ...
