"""In-place writes: to values, through views of them, and to `out=`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from proofs.fuzz.pool.operator import Block, Draw, Operand, Operator, Rejected


def _target(d: Draw, ndim: tuple[int, int] = (0, 4)) -> tuple[list[str], Operand]:
    """A value that may be written to, computed by the program or new, and the statements that compute a new one."""
    x = d.floats(ndim, nonempty=True)
    if d.is_own(x) and d.maybe(0.35):
        return [], x
    name = d.name()
    copies = [f"{x}.clone()", f"{x} * 1.5", f"{x}.sin()", f"{x}.contiguous().clone()"]
    copies += [f"{x}.transpose(0, -1) * 2", f"{x}.mT.clone()"] if x.ndim > 1 else []
    text = d.choice(*copies)
    value, moved = d.environment.evaluate(text)
    d.environment.bind(name, value, moved)
    return [f"{name} = {text}"], Operand(name, value)


def _write(make: Callable[[Draw, Operand], str], ndim: tuple[int, int] = (0, 4)) -> Operator:
    """Statements that write to a value, which they may also read."""

    def operator(d: Draw) -> Block:
        setup, x = _target(d, ndim)
        written = make(d, x)
        return Block((*setup, *written.split("\n")), (str(x),))

    return operator


def _pointwise(d: Draw, x: Operand) -> str:
    return d.choice(
        f"{x}.sin_()",
        f"{x}.mul_({d.number()})",
        f"{x}.clamp_(-1.1, 1.2)",
        f"{x}.neg_()",
        f"{x}.tanh_()",
        f"{x} += {d.number()}",
    )


def _binary(d: Draw, x: Operand) -> str:
    y = d.broadcast(x)
    return d.choice(
        f"{x}.add_({y}, alpha=0.5)",
        f"{x}.mul_({y})",
        f"{x}.sub_({y})",
        f"{x} -= {y}",
        f"{x}.copy_({y})",
        f"{x}.lerp_({y}.expand_as({x}), 0.3)",
        f"{x}.addcmul_({y}, {y})",
    )


def _lerp(d: Draw, x: Operand) -> str:
    return d.choice(f"{x}.lerp_({d.like(x)}, 0.3)", f"{x}.lerp_({d.like(x)}, {d.like(x)}.sigmoid())")


def _slice(d: Draw, x: Operand) -> str:
    return d.choice(
        f"{x}[1:].mul_(2)",
        f"{x}[..., :1] *= 2",
        f"{x}[::2] = {d.number()}",
        f"{x}.narrow(0, 0, 1).zero_()",
        f"{x}[-1] += 1.5",
        f"{x}[..., ::2].sin_()",
        f"{x}[0] = {x}[-1]",
    )


def _slice_tensor(d: Draw, x: Operand) -> str:
    y = d.sized(x.shape[1:])
    return d.choice(f"{x}[0] = {y}", f"{x}[1:] = {y}", f"{x}[-1].add_({y})")


def _transposed(d: Draw, x: Operand) -> str:
    return d.choice(
        f"{x}.mT.add_(1)",
        f"{x}.transpose(0, 1)[0].mul_(3)",
        f"{x}.mT[..., 1:] = 0.5",
        f"{x}.movedim(0, -1).neg_()",
        f"{x}.diagonal().fill_(0.7)",
        f"{x}.select(1, 0).zero_()",
    )


def _through_view(d: Draw, x: Operand) -> str:
    return d.choice(
        f"{x}.flatten().mul_(2)",
        f"{x}.view(-1)[::2].add_(1)",
        f"{x}.unsqueeze(0).mul_(0.5)",
        f"{x}.unflatten(0, (1, -1)).sub_(0.2)",
        f"{x}.ravel().neg_()",
    )


def _through_strides(d: Draw, x: Operand) -> str:
    return d.choice(
        f"{x}.as_strided(({min(x.numel, 3)},), (1,)).mul_(3)",
        f"{x}.unfold(0, {d.integer(1, x.shape[0])}, {x.shape[0]}).mul_(2)",
        f"{x}.unfold(-1, 1, 2).zero_()",
    )


def _expanded(d: Draw, x: Operand) -> str:
    return d.choice(
        f"{x}.expand(2, *{x}.shape).zero_()",
        f"{x}.expand(1, *{x}.shape).mul_(2)",
        f"{x}.unsqueeze(0).expand(2, {'-1, ' * x.ndim}).fill_(0.3)".replace(", )", ")"),
        f"{x}[:1].expand({x}.shape).fill_(0.4)",
    )


def _mask(d: Draw, x: Operand) -> str:
    return d.choice(
        f"{x}[{x} > 0.3] = 0.125",
        f"{x}.masked_fill_({x} < -0.2, 0.5)",
        f"{x}[({x} > 0.1) & ({x} < 0.9)] = -1.0",
    )


def _mask_mapped(d: Draw) -> Block:
    """A masked write to each row under vmap; one device computes it by `torch.where`."""
    x, write, name = d.floats((2, 3), nonempty=True), d.name(), d.name()
    body = (f"def {write}(row):", "    row = row * 1.5", "    row[row > 0.3] = 0.125", "    return row")
    plain = f"torch.where({x} * 1.5 > 0.3, 0.125, {x} * 1.5)"
    return Block((*body, f"{name} = torch.func.vmap({write})({x}) if is_tracing() else {plain}"), (name,))


def _mask_value(d: Draw) -> Block:
    """The gradient of a masked write with respect to the number that is written."""
    x, y, write, name = d.floats((1, 3), nonempty=True), d.floats((0, 1), nonempty=True), d.name(), d.name()
    body = (
        f"def {write}(value):",
        f"    t = {x} * 1.5",
        "    t[t > 0.3] = value.sum()",
        "    return t.square().sum()",
    )
    return Block((*body, f"{name} = torch.func.grad({write})({y})"), (name,))


def _pushed(d: Draw) -> str:
    """Forward-mode derivatives of in-place writes."""
    x = d.floats((0, 3), nonempty=True)
    y = d.like(x)
    return _tangent(x, d.choice(f"lerp_({y}, 0.3)", f"addcmul_({y}, {y})", f"mul_({y})"))


def _lerp_pushed(d: Draw) -> str:
    """The forward-mode derivative of a write that torch's functionalization does not support."""
    x = d.floats((0, 3), nonempty=True)
    y = d.like(x)
    return _tangent(x, f"lerp_({y}, {y}.sigmoid())")


def _tangent(x: Operand, write: str) -> str:
    return f"torch.func.jvp(lambda t: (t * 2).{write}, ({x}.contiguous(),), ({x}.cos().contiguous(),))"


def _mask_rows(d: Draw, x: Operand) -> str:
    mask = [bool((n * 5 + 1) % 3) for n in range(x.shape[0])]
    return d.choice(
        f"{x}[torch.tensor({mask})] = {d.number()}",
        f"{x}[{x}.flatten(1).sum(1) > 0] = 0.25" if x.ndim > 1 else f"{x}[{x}.abs() > 0.5] = 1.5",
    )


def _index(d: Draw, x: Operand) -> str:
    count = d.integer(1, x.shape[0])
    index = d.index((count,), x.shape[0], distinct=True)
    y = d.sized((count, *x.shape[1:]))
    return d.choice(
        f"{x}[{index}] = {y}", f"{x}[{index}] += {y}", f"{x}.index_copy_(0, {index}, {y})", f"{x}[{index}] = 0.5"
    )


def _index_put(d: Draw, x: Operand) -> str:
    count = d.integer(1, 3)
    y = d.sized((count, *x.shape[1:]))
    index = d.index((count,), x.shape[0])
    return d.choice(f"{x}.index_put_(({index},), {y}, accumulate=True)", f"{x}.index_add_(0, {index}, {y})")


def _index_two(d: Draw, x: Operand) -> str:
    count = d.integer(1, min(x.shape[:2]))
    rows, columns = (d.index((count,), size, distinct=True) for size in x.shape[:2])
    return f"{x}[{rows}, {columns}] = {d.sized((count, *x.shape[2:]))}"


def _scatter(d: Draw, x: Operand) -> str:
    dim = d.dim(x)
    shape = list(x.shape)
    shape[dim] = d.integer(1, 3)
    index = d.index(shape, x.shape[dim])
    return d.choice(
        f"{x}.scatter_add_({dim}, {index}, {d.sized(shape)})",
        f"{x}.scatter_({dim}, {index}, 0.75)",
        f"{x}.scatter_reduce_({dim}, {index}, {d.sized(shape)}, 'amax')",
    )


def _chunks(d: Draw, x: Operand) -> str:
    if x.shape[0] < 2 or x.shape[0] % 2:
        raise Rejected("odd")
    first, second = d.name(), d.name()
    return f"{first}, {second} = {x}.chunk(2)\n{first}.mul_({second})"


def _fill_diagonal(d: Draw, x: Operand) -> str:
    return f"{x}.fill_diagonal_({d.number()})"


def _functional(d: Draw, x: Operand) -> str:
    return d.choice(
        f"F.relu({x}, inplace=True)",
        f"F.leaky_relu_({x}, 0.2)",
        f"F.elu_({x})",
        f"F.hardtanh({x}, -0.8, 0.9, inplace=True)",
        f"F.silu({x}, inplace=True)",
        f"F.threshold_({x}, 0.1, 0.2)",
    )


def _swapped(d: Draw) -> Block:
    """In-place changes of a tensor's shape."""
    x, name = d.floats((2, 4), nonempty=True), d.name()
    change = d.choice("transpose_(0, 1)", "squeeze_()", "unsqueeze_(1)", "swapaxes_(0, -1)")
    return Block((f"{name} = {x} * 2", f"{name}.{change}"), (name,))


def _out(d: Draw) -> Block:
    x, name = d.floats((0, 4), nonempty=True), d.name()
    y = d.like(x)
    made = d.choice(f"torch.empty({x.shape})", f"torch.empty_like({x})", f"torch.zeros({x.shape}, dtype=torch.float64)")
    write = d.choice(
        "torch.add({x}, {y}, out={o})",
        "torch.mul({x}, {y}, out={o})",
        "torch.sin({x}, out={o})",
        "torch.maximum({x}, {y} + 0.1, out={o})",
    )
    return Block((f"{name} = {made}", write.format(x=x, y=y, o=name)), (name,))


def _out_transposed(d: Draw) -> Block:
    x, name = d.floats(2, nonempty=True), d.name()
    y = d.sized((x.shape[1], None))
    rows, columns = x.shape[0], y.shape[1]
    return Block((f"{name} = torch.empty({columns}, {rows}).t()", f"torch.mm({x}, {y}, out={name})"), (name,))


def _out_slice(d: Draw) -> Block:
    x, name = d.floats((1, 3), nonempty=True), d.name()
    shape = (x.shape[0] + 1, *x.shape[1:])
    return Block((f"{name} = torch.zeros({shape})", f"torch.mul({x}, 2, out={name}[1:])"), (name,))


def _out_cat(d: Draw) -> Block:
    x, name = d.floats((1, 3), nonempty=True), d.name()
    y = d.like(x)
    shape = (2 * x.shape[0], *x.shape[1:])
    return Block((f"{name} = torch.empty({shape})", f"torch.cat([{x}, {y}], out={name})"), (name,))


def _accumulate(d: Draw) -> Block:
    x, name = d.floats((1, 3), nonempty=True), d.name()
    return Block(
        (
            f"{name} = torch.zeros({x.shape[1:]})",
            f"for row in {x}:",
            f"    {name} = {name} * 0.5 + row",
            f"    {name}.tanh_()",
        ),
        (name,),
    )


def _filled_rows(d: Draw) -> Block:
    """A result that is filled row by row."""
    x, name = d.floats((2, 3), nonempty=True), d.name()
    return Block(
        (
            f"{name} = torch.empty_like({x})",
            f"for number in range({x.shape[0]}):",
            f"    {name}[number] = {x}[number] * number",
        ),
        (name,),
    )


def _int(d: Draw) -> Block:
    x, name = d.ints((1, 3), nonempty=True), d.name()
    change = d.choice("add_(3)", "mul_(2)", "bitwise_and_(3)", "clamp_(0, 4)", "zero_()", "remainder_(3)")
    part = d.choice("", "[1:]", "[..., ::2]")
    return Block((f"{name} = {x}.clone()", f"{name}{part}.{change}"), (name,))


def _complex(d: Draw) -> Block:
    x, name = d.complexes((1, 3), nonempty=True), d.name()
    change = d.choice(
        f"{name}.real.mul_(2)",
        f"{name}.mul_(1j)",
        f"{name}[0] = 1 + 2j",
        f"torch.view_as_real({name})[..., 1].zero_()",
        f"{name}.imag[0] = 0.5",
    )
    return Block((f"{name} = {x} * 2", change), (name,))


def _view_kept(d: Draw) -> Block:
    """A view that is read after its base was written to."""
    x, view, base = d.floats((1, 3), nonempty=True), d.name(), d.name()
    look = d.choice(f"{base}[..., ::2]", f"{base}.flatten()", f"{base}.transpose(0, -1)", f"{base}[0]")
    return Block((f"{base} = {x} * 0.5", f"{view} = {look}", f"{base}.add_({x})"), (base, view))


OPERATORS: Mapping[str, Operator] = {
    "inplace_pointwise": _write(_pointwise),
    "inplace_binary": _write(_binary),
    "inplace_lerp": _write(_lerp),
    "inplace_slice": _write(_slice, (1, 4)),
    "inplace_slice_tensor": _write(_slice_tensor, (1, 3)),
    "inplace_transposed": _write(_transposed, (2, 2)),
    "inplace_through_view": _write(_through_view, (1, 3)),
    "inplace_through_strides": _write(_through_strides, (1, 3)),
    "inplace_expanded": _write(_expanded, (1, 3)),
    "inplace_mask": _write(_mask, (0, 3)),
    "inplace_mask_rows": _write(_mask_rows, (1, 3)),
    "inplace_mask_mapped": _mask_mapped,
    "inplace_mask_value": _mask_value,
    "inplace_pushed": _pushed,
    "inplace_lerp_pushed": _lerp_pushed,
    "inplace_index": _write(_index, (1, 3)),
    "inplace_index_put": _write(_index_put, (1, 3)),
    "inplace_index_two": _write(_index_two, (2, 3)),
    "inplace_scatter": _write(_scatter, (1, 3)),
    "inplace_chunks": _write(_chunks, (1, 3)),
    "inplace_fill_diagonal": _write(_fill_diagonal, (2, 2)),
    "inplace_functional": _write(_functional),
    "inplace_shape": _swapped,
    "inplace_int": _int,
    "inplace_complex": _complex,
    "out": _out,
    "out_transposed": _out_transposed,
    "out_slice": _out_slice,
    "out_cat": _out_cat,
    "accumulate": _accumulate,
    "filled_rows": _filled_rows,
    "view_kept": _view_kept,
}
