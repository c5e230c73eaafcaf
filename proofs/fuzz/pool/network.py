"""Layers of networks: convolutions, pools, norms, recurrent kernels, attention."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operand, Operator, Rejected, chosen


def _image(d: Draw, spatial: int, least: int = 2) -> Operand:
    def fits(tensor: object) -> bool:
        shape = tensor.shape  # type: ignore[attr-defined]
        return min(shape) > 0 and min(shape[2:]) >= least

    def make() -> list[int]:
        return [
            d.integer(1, 4),
            d.choice(1, 2, 2, 4),
            *[d.integer(least, 5 if spatial < 3 else 3) for _ in range(spatial)],
        ]

    return d.floats(spatial + 2, where=fits, make=make, fresh=0.15)


def _bias(d: Draw, channels: int) -> str:
    return f", {d.sized((channels,))}" if d.maybe() else ""


def _conv(spatial: int) -> Operator:
    def operator(d: Draw) -> str:
        x = _image(d, spatial)
        channels = x.shape[1]
        groups = d.choice(1, 1, channels, 2 if channels % 2 == 0 else 1)
        kernel = [d.integer(1, 2 if size < 3 else 3) for size in x.shape[2:]]
        out = groups * d.integer(1, 2)
        weight = d.sized((out, channels // groups, *kernel))
        bias = _bias(d, out) or ", None"
        options = f"stride={d.integer(1, 2)}, padding={d.integer(0, 1)}, dilation={d.choice(1, 1, 2)}, groups={groups}"
        if d.maybe(0.15):
            options = f"padding='{d.choice('same', 'valid')}', groups={groups}"
        return f"F.conv{spatial}d({x}, {weight}{bias}, {options})"

    return operator


def _conv_transpose(spatial: int) -> Operator:
    def operator(d: Draw) -> str:
        x = _image(d, spatial, 1)
        channels = x.shape[1]
        groups = d.choice(1, 1, channels)
        kernel = [d.integer(1, 3) for _ in range(spatial)]
        weight = d.sized((channels, d.integer(1, 2), *kernel))
        bias = _bias(d, groups * weight.shape[1]) or ", None"
        stride = d.integer(1, 2)
        sides = f"stride={stride}, padding={d.integer(0, 1)}, output_padding={d.integer(0, stride - 1)}"
        options = f"{sides}, groups={groups}, dilation={d.choice(1, 1, 2)}"
        return f"F.conv_transpose{spatial}d({x}, {weight}{bias}, {options})"

    return operator


def _max_pool(d: Draw) -> str:
    spatial = d.integer(1, 2)
    return f"F.max_pool{spatial}d({_image(d, spatial)}, 2, stride={d.integer(1, 2)}, padding={d.integer(0, 1)})"


def _max_pool_indices(d: Draw) -> str:
    return f"F.max_pool2d({_image(d, 2)}, 2, return_indices=True)"


def _avg_pool(d: Draw) -> str:
    spatial = d.integer(1, 2)
    options = f"stride={d.integer(1, 2)}, padding={d.integer(0, 1)}, count_include_pad={d.maybe()}"
    return f"F.avg_pool{spatial}d({_image(d, spatial)}, 2, {options})"


def _adaptive_avg_pool(d: Draw) -> str:
    spatial = d.integer(1, 2)
    return f"F.adaptive_avg_pool{spatial}d({_image(d, spatial, 1)}, {d.integer(1, 3)})"


def _adaptive_max_pool(d: Draw) -> str:
    spatial = d.integer(1, 2)
    return f"F.adaptive_max_pool{spatial}d({_image(d, spatial, 1)}, {d.integer(1, 3)})"


def _lp_pool(d: Draw) -> str:
    return f"F.lp_pool2d({_image(d, 2)}.abs() + 0.2, 2, 2)"


def _batch_norm(d: Draw) -> str:
    x = d.floats(
        (2, 4),
        nonempty=True,
        where=lambda t: t.numel() // t.shape[1] > 1,
        make=lambda: (d.integer(2, 4), d.integer(1, 4), d.integer(2, 3)),
    )
    channels = (x.shape[1],)
    if d.maybe():
        return f"F.batch_norm({x}, None, None, {d.sized(channels)}, {d.sized(channels)}, training=True)"
    return f"F.batch_norm({x}, {d.sized(channels)}, {d.sized(channels)}.square() + 0.3, {d.sized(channels)})"


def _batch_norm_statistics(d: Draw) -> str:
    x = d.floats(
        (2, 3),
        nonempty=True,
        where=lambda t: t.numel() // t.shape[1] > 1,
        make=lambda: (d.integer(2, 4), d.integer(1, 4)),
    )
    channels = (x.shape[1],)
    statistics = f"{d.sized(channels)}.clone(), {d.sized(channels)}.square() + 0.3"
    return f"(lambda m, s: (F.batch_norm({x}, m, s, training=True, momentum=0.3), m, s))({statistics})"


def _instance_norm(d: Draw) -> str:
    x = d.floats(
        (3, 4),
        nonempty=True,
        where=lambda t: t[0, 0].numel() > 1,
        make=lambda: (d.integer(1, 3), d.integer(1, 3), d.integer(2, 4)),
    )
    return f"F.instance_norm({x})"


def _group_norm(d: Draw) -> str:
    x = d.floats((2, 4), nonempty=True, make=lambda: (d.integer(1, 3), 4, d.integer(2, 3)))
    groups = d.choice(*[n for n in range(1, x.shape[1] + 1) if x.shape[1] % n == 0])
    if x.tensor[0].numel() // groups < 2:
        raise Rejected("groups of one")
    affine = f", {d.sized((x.shape[1],))}" if d.maybe() else ""
    return f"F.group_norm({x}, {groups}{affine})"


def _group_norm_transposed(d: Draw) -> str:
    """Group norm of images whose batch and channels are transposed in memory."""
    x = d.floats(3, where=lambda t: t.shape[0] == 4 and t[0].numel() > 0, make=lambda: (4, d.integer(2, 3), 3))
    return f"F.group_norm({x}.transpose(0, 1), 2)"


def _layer_norm(d: Draw) -> str:
    x = d.floats((1, 4), nonempty=True, where=lambda t: t.shape[-1] > 1)
    shape = x.shape[d.integer(0, x.ndim - 1) :]
    affine = f", {d.sized(shape)}, {d.sized(shape)}" if d.maybe() else ""
    return f"F.layer_norm({x}, {shape}{affine})"


def _rms_norm(d: Draw) -> str:
    x = d.floats((1, 4), nonempty=True, where=lambda t: t.shape[-1] > 1)
    shape = x.shape[-1:]
    affine = f", {d.sized(shape)}" if d.maybe() else ""
    return f"F.rms_norm({x}, {shape}{affine}, eps=1e-5)"


def _local_response_norm(d: Draw) -> str:
    return f"F.local_response_norm({_image(d, 1, 1)}, 2)"


def _heads(d: Draw) -> tuple[Operand, Operand, Operand]:
    q = d.floats((3, 4), nonempty=True)
    k = d.sized((*q.shape[:-2], None, q.shape[-1]))
    return q, k, d.sized((*k.shape[:-1], None))


def _attention(d: Draw) -> str:
    q, k, v = _heads(d)
    rows, columns = q.shape[-2], k.shape[-2]
    options = [""]
    options += [f", attn_mask={d.sized((rows, columns))}"] if d.maybe() else []
    options += [f", attn_mask={d.sized((rows, columns))} > -0.9"] if d.maybe(0.3) else []
    options += [", is_causal=True"] if d.maybe() else []
    return f"F.scaled_dot_product_attention({q}, {k}, {v}{options[-1]})"


def _attention_fused(d: Draw) -> str:
    """Attention with shapes that fused kernels support, and heads split and transposed as in modules."""
    batch, heads, rows, width = d.integer(1, 3), d.integer(1, 3), d.integer(1, 4), d.integer(1, 4)
    operands = [d.sized((batch, rows, heads * width)) for _ in range(3)]
    split = [f"{x}.unflatten(-1, ({heads}, {width})).transpose(1, 2)" for x in operands]
    return f"F.scaled_dot_product_attention({', '.join(split)}{d.choice('', ', is_causal=True')})"


def _attention_transposed(d: Draw) -> str:
    x = d.floats(4, nonempty=True)
    return f"(lambda q: F.scaled_dot_product_attention(q, q, q))({x}.transpose(-1, -2).contiguous())"


def _multi_head_attention(d: Draw) -> str:
    """Multi-head attention: projection, split into heads, attention, join."""
    rows, width = d.integer(1, 4), 4
    x = d.sized((None, rows, width))
    w = d.sized((3 * width, width))
    return (
        f"(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))"
        f"(*[t.unflatten(-1, (2, 2)).transpose(1, 2) for t in F.linear({x}, {w}).chunk(3, -1)])"
    )


def _recurrent(d: Draw) -> str:
    kernel, gates = d.choice(("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("lstm", 4))
    x = d.floats(3, nonempty=True)
    first = d.maybe()
    hidden, bidirectional = d.integer(1, 3), d.maybe(0.25)
    directions = 2 if bidirectional else 1
    batch = x.shape[0 if first else 1]
    weights = []
    for _ in range(directions):
        weights += [d.sized((gates * hidden, x.shape[2])), d.sized((gates * hidden, hidden))]
        weights += [d.sized((gates * hidden,)), d.sized((gates * hidden,))]
    state = f"torch.zeros({directions}, {batch}, {hidden})" if d.maybe() else f"{d.sized((directions, batch, hidden))}"
    states = f"({state}, {d.sized((directions, batch, hidden))})" if kernel == "lstm" else state
    return f"torch.{kernel}({x}, {states}, [{', '.join(weights)}], True, 1, 0.0, False, {bidirectional}, {first})[0]"


def _cell(d: Draw) -> str:
    kernel, gates = d.choice(("lstm_cell", 4), ("gru_cell", 3), ("rnn_relu_cell", 1), ("rnn_tanh_cell", 1))
    x = d.floats(2, nonempty=True)
    hidden = d.integer(1, 3)
    state = f"{d.sized((x.shape[0], hidden))}"
    states = f"({state}, {d.sized((x.shape[0], hidden))})" if kernel == "lstm_cell" else state
    weights = f"{d.sized((gates * hidden, x.shape[1]))}, {d.sized((gates * hidden, hidden))}"
    return f"torch.{kernel}({x}, {states}, {weights})"


def _glu(d: Draw) -> str:
    x = d.floats(
        (1, 4), where=lambda t: any(size and size % 2 == 0 for size in t.shape), make=lambda: (d.integer(1, 4), 4)
    )
    return f"F.glu({x}, {d.choice(*[n for n, size in enumerate(x.shape) if size and size % 2 == 0])})"


def _prelu(d: Draw) -> str:
    x = d.floats((2, 4), nonempty=True)
    return f"F.prelu({x} + 0.05, {d.sized(d.choice((1,), (x.shape[1],)))})"


def _linear_relu(d: Draw) -> str:
    x = d.floats((1, 3), nonempty=True)
    w = d.sized((None, x.shape[-1]))
    return f"F.linear({x}, {w}, {d.sized((w.shape[0],))}).relu().square()"


def _max_unpool(d: Draw) -> str:
    return f"F.max_unpool2d(*F.max_pool2d({_image(d, 2)}, 2, return_indices=True), 2)"


OPERATORS: Mapping[str, Operator] = {
    "conv1d": _conv(1),
    "conv2d": _conv(2),
    "conv3d": _conv(3),
    "conv_transpose": chosen(_conv_transpose(1), _conv_transpose(2)),
    "max_pool": _max_pool,
    "max_pool_indices": _max_pool_indices,
    "max_unpool": _max_unpool,
    "avg_pool": _avg_pool,
    "adaptive_avg_pool": _adaptive_avg_pool,
    "adaptive_max_pool": _adaptive_max_pool,
    "lp_pool": _lp_pool,
    "batch_norm": _batch_norm,
    "batch_norm_statistics": _batch_norm_statistics,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "group_norm_transposed": _group_norm_transposed,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "local_response_norm": _local_response_norm,
    "attention": _attention,
    "attention_fused": _attention_fused,
    "attention_transposed": _attention_transposed,
    "multi_head_attention": _multi_head_attention,
    "recurrent": _recurrent,
    "recurrent_cell": _cell,
    "glu": _glu,
    "prelu": _prelu,
    "mlp": _linear_relu,
}
