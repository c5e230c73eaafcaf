"""The `torch.func` transform that a program runs under, as text."""

from __future__ import annotations

from enum import Enum

import attrs


class Kind(str, Enum):
    """A transform."""

    NONE = "none"
    GRAD = "grad"
    VJP = "vjp"
    JVP = "jvp"
    LINEARIZE = "linearize"
    VMAP = "vmap"
    ROW_GRAD = "vmap of grad"
    JACREV = "jacrev"
    JACFWD = "jacfwd"
    HESSIAN = "hessian"
    GRAD_GRAD = "grad of grad"


@attrs.frozen
class Transform:
    """A transform with its arguments.

    Args:
        kind: the kind of transform.
        argnums: the positions of the arguments that it differentiates with respect to.
        in_dims: for each argument, the dim that vmap maps over, or None.
        out_dim: the mapped dim of the results.
    """

    kind: Kind = Kind.NONE
    argnums: tuple[int, ...] = ()
    in_dims: tuple[int | None, ...] = ()
    out_dim: int = 0

    @property
    def maps(self) -> bool:
        """Whether it maps over a dim of the arguments."""
        return self.kind in (Kind.VMAP, Kind.ROW_GRAD)

    @property
    def differentiates(self) -> bool:
        """Whether there must be a floating-point argument."""
        return self.kind not in (Kind.NONE, Kind.VMAP)

    @property
    def has_reference(self) -> bool:
        """Whether one device runs another function: torch's own `linearize` traces, and sometimes crashes."""
        return self.kind is Kind.LINEARIZE

    def reference(self, arguments: tuple[str, ...]) -> str:
        """The source of the function `reference`, which one device runs in place of `program`."""
        other = attrs.evolve(self, kind=Kind.JVP).text(arguments)
        return other[other.index("def program") :].replace("def program", "def reference")

    def text(self, arguments: tuple[str, ...]) -> str:
        """The source of the function `program`, which calls `f`; both return a list of tensors."""
        names = ", ".join(arguments)
        chosen = ", ".join(arguments[index] for index in self.argnums)
        if self.kind is Kind.NONE:
            return "program = f\n"
        lines = {
            Kind.GRAD: [
                f"grads, value = torch.func.grad_and_value(loss, argnums={self.argnums})({names})",
                "return [value, *grads]",
            ],
            Kind.VJP: [
                "values, pull = torch.func.vjp(g, CHOSEN)",
                "return [*values, *pull([v.cos() for v in values])]",
            ],
            Kind.JVP: [
                "values, tangents = torch.func.jvp(g, (CHOSEN,), (TANGENTS,))",
                "return [*values, *tangents]",
            ],
            Kind.LINEARIZE: [
                "values, push = torch.func.linearize(g, CHOSEN)",
                "return [*values, *push(TANGENTS)]",
            ],
            # not by out_dims=-1, with which torch reads beyond the shape of a result that has no batch
            Kind.VMAP: [
                f"rows = torch.func.vmap(f, in_dims={self.in_dims})({names})",
                f"return [row.movedim(0, {self.out_dim}) for row in rows]",
            ],
            Kind.ROW_GRAD: [
                f"slope = torch.func.grad_and_value(loss, argnums={self.argnums})",
                f"grads, value = torch.func.vmap(slope, in_dims={self.in_dims})({names})",
                "return [value, *grads]",
            ],
            Kind.JACREV: [f"rows = torch.func.jacrev(g, argnums={tuple(range(len(self.argnums)))})(CHOSEN)", _FLAT],
            Kind.JACFWD: [f"rows = torch.func.jacfwd(g, argnums={tuple(range(len(self.argnums)))})(CHOSEN)", _FLAT],
            Kind.HESSIAN: [f"rows = torch.func.hessian(loss, argnums={self.argnums})({names})", _FLAT],
            Kind.GRAD_GRAD: [
                f"slope = lambda *args: total(torch.func.grad(loss, argnums={self.argnums})(*args))",
                f"return list(torch.func.grad(slope, argnums={self.argnums})({names}))",
            ],
        }[self.kind]
        tangents = ", ".join(f"{arguments[index]}.cos()" for index in self.argnums)
        body = "".join(f"    {line.replace('CHOSEN', chosen).replace('TANGENTS', tangents)}\n" for line in lines)
        inner = (
            f"    def g({chosen}):\n        return [v for v in f({names}) if is_smooth(v)]\n\n"
            if " g," in body or "(g," in body
            else ""
        )
        return f"{_LOSS if 'loss' in body else _SMOOTH}def program({names}):\n{inner}{body}"


_FLAT = "return [part for row in rows for part in row]"
_SMOOTH = """def is_smooth(v):
    return v.is_floating_point() or v.is_complex()


"""
_LOSS = f"""{_SMOOTH}def total(values):
    return sum((v * v.conj()).real.sum() for v in values if is_smooth(v))


def loss(*args):
    return total(f(*args))


"""
