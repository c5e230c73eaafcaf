"""Gradients of layers with respect to all of their operands, independent of the transform around the program."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operand, Operator


def _gradient(layer: str, *operands: Operand) -> str:
    """The gradients of a layer, which is an expression of `a`, `b`, ... for the operands."""
    names = ", ".join("abcd"[: len(operands)])
    loss = f"lambda {names}: {layer}.sin().sum()"
    return f"torch.func.grad({loss}, argnums={tuple(range(len(operands)))})({', '.join(operands)})"


def _layer_norm(d: Draw) -> str:
    x = d.floats((2, 4), nonempty=True, where=lambda t: t.shape[-1] > 1)
    shape = x.shape[-1:]
    return _gradient(f"F.layer_norm(a, {shape}, b, c)", x, d.sized(shape), d.sized(shape))


def _group_norm(d: Draw) -> str:
    x = d.sized((d.integer(1, 3), 4, d.integer(2, 4)))
    return _gradient("F.group_norm(a, 2, b, c)", x, d.sized((4,)), d.sized((4,)))


def _batch_norm(d: Draw) -> str:
    x = d.sized((d.integer(2, 5), d.integer(1, 4), d.integer(2, 4)))
    channels = x.shape[1:2]
    return _gradient("F.batch_norm(a, None, None, b, c, training=True)", x, d.sized(channels), d.sized(channels))


def _linear(d: Draw) -> str:
    x = d.floats((2, 4), nonempty=True)
    rows = d.integer(1, 4)
    return _gradient("F.linear(a, b, c)", x, d.sized((rows, x.shape[-1])), d.sized((rows,)))


def _convolution(d: Draw) -> str:
    x = d.sized((d.integer(1, 4), d.integer(1, 3), d.integer(3, 6)))
    out = d.integer(1, 3)
    layer = f"F.conv1d(a, b, c, stride={d.integer(1, 2)}, padding={d.integer(0, 1)})"
    return _gradient(layer, x, d.sized((out, x.shape[1], d.integer(1, 3))), d.sized((out,)))


def _transposed_convolution(d: Draw) -> str:
    x = d.sized((d.integer(1, 4), d.integer(1, 3), d.integer(2, 5)))
    out = d.integer(1, 3)
    layer = f"F.conv_transpose1d(a, b, c, stride={d.integer(1, 2)})"
    return _gradient(layer, x, d.sized((x.shape[1], out, d.integer(1, 3))), d.sized((out,)))


def _attention(d: Draw) -> str:
    batch, heads, width = d.integer(1, 3), d.integer(1, 2), d.integer(1, 3)
    queries, keys = d.integer(2, 5), d.integer(2, 5)
    q, k, v = (d.sized((batch, heads, rows, width)) for rows in (queries, keys, keys))
    return _gradient("F.scaled_dot_product_attention(a, b, c)", q, k, v)


def _attention_transposed(d: Draw) -> str:
    """Gradients with heads split and transposed, as in modules, so that rows are not adjacent in memory."""
    batch, rows, width = d.integer(1, 3), d.integer(2, 4), d.integer(2, 3)
    q, k, v = (d.sized((batch, 2, width, rows)) for _ in range(3))
    return _gradient("F.scaled_dot_product_attention(a.mT, b.mT, c.mT)", q, k, v)


def _cross_entropy(d: Draw) -> str:
    more = d.choice((), (d.integer(1, 3),))
    x = d.sized((d.integer(2, 5), d.integer(2, 5), *more))
    return _gradient(f"F.cross_entropy(a, {d.index((x.shape[0], *more), x.shape[1])})", x)


def _nll_images(d: Draw) -> str:
    """The gradient for images whose classes are the last dim and are moved to dim 1 for the loss."""
    x = d.sized((d.integer(1, 3), d.integer(1, 3), d.integer(2, 3), d.integer(2, 5)))
    target = d.index(x.shape[:3], x.shape[3])
    return _gradient(f"F.nll_loss(a.movedim(-1, 1).contiguous(), {target}, reduction='sum')", x)


def _embedding(d: Draw) -> str:
    table = d.sized((d.integer(2, 6), d.integer(1, 4)))
    return _gradient(f"F.embedding({d.index((d.integer(2, 5),), table.shape[0])}, a)", table)


def _softmax(d: Draw) -> str:
    x = d.floats((1, 4), nonempty=True)
    return _gradient(f"a.softmax({d.dim(x)})", x)


OPERATORS: Mapping[str, Operator] = {
    "grad_of_layer_norm": _layer_norm,
    "grad_of_group_norm": _group_norm,
    "grad_of_batch_norm": _batch_norm,
    "grad_of_linear": _linear,
    "grad_of_convolution": _convolution,
    "grad_of_transposed_convolution": _transposed_convolution,
    "grad_of_attention": _attention,
    "grad_of_attention_transposed": _attention_transposed,
    "grad_of_cross_entropy": _cross_entropy,
    "grad_of_nll_images": _nll_images,
    "grad_of_embedding": _embedding,
    "grad_of_softmax": _softmax,
}
