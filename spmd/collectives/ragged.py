"""`ragged_all_to_all`: an all_to_all of rows whose numbers are data."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd.collectives.environment import axis_size, resolve_axes
from spmd.collectives.functional import AxisName, all_gather, axis_index, refuse_groups, varying
from spmd.core.spec import TensorMeta
from spmd.errors import SpmdError

VECTORS = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def ragged_all_to_all(
    operand: Tensor,
    output: Tensor,
    input_offsets: Tensor,
    send_sizes: Tensor,
    output_offsets: Tensor,
    recv_sizes: Tensor,
    *,
    axis_name: AxisName,
    axis_index_groups: None = None,
) -> Tensor:
    """`output`, with rows of the operands of all ranks written to it; `jax.lax.ragged_all_to_all`.

    This rank sends the `send_sizes[i]` rows of `operand` from row `input_offsets[i]` on to the rank at index i, which
    writes them to its output from row `output_offsets[i]` on. The sizes are data: every rank reads them on the host
    when it runs, after one all_gather of the vectors. `plan.comms` shows that all_gather, and the bytes of all of
    `operand` as an upper bound of what is sent, if no row is sent twice.

    It is linear in `operand` and `output`. A row that is sent to several ranks gets the sum of their cotangents. Unlike
    in JAX, rows of an output that two ranks send to are an error, and so is a row out of range.

    Args:
        operand: a tensor of at least one dim, the rows that are sent.
        output: a tensor of the dtype of `operand`, whose shape differs in dim 0 only.
        input_offsets, send_sizes: integer vectors, of one element for each rank: the rows that it is sent.
        output_offsets: where in the output *of the other rank* these rows begin.
        recv_sizes: how many rows each rank sends to this one: `send_sizes`, exchanged by `all_to_all`.
        axis_name: one or several mesh axes.
        axis_index_groups: not supported: name another mesh axis instead.

    Returns:
        A tensor like `output`.

    Raises:
        SpmdError: an axis that is not bound, or arguments of other shapes or dtypes. When it runs, on all ranks alike:
            a row that is out of range, or that two ranks send to.
        DivergenceError: when it runs, on all ranks alike: `recv_sizes` of one rank are not `send_sizes` of another.

    >>> import spmd
    >>> from spmd.collectives import all_to_all
    >>> def send(rows, sizes):
    ...     received = all_to_all(sizes, "x", 0, 0, tiled=True)
    ...     places = all_to_all(received.cumsum(0) - received, "x", 0, 0, tiled=True)
    ...     starts = sizes.cumsum(0) - sizes
    ...     return ragged_all_to_all(rows, rows.new_zeros(5), starts, sizes, places, received, axis_name="x")
    >>> run = spmd.shard_map(send, spmd.make_mesh({"x": 2}, runtime="virtual"), spmd.P("x"), spmd.P("x"))
    >>> run(torch.arange(6.0), torch.tensor([1, 2, 0, 3])).full_tensor()  # rank 0 sends 1 and 2 rows, rank 1 0 and 3
    tensor([0., 0., 0., 0., 0., 1., 2., 3., 4., 5.])
    """
    refuse_groups("ragged_all_to_all", axis_index_groups)
    axes, _ = resolve_axes(axis_name)
    count = axis_size(axes)
    _check_rows(operand, output)
    vectors = (input_offsets, send_sizes, output_offsets, recv_sizes)
    for name, vector in zip(VECTORS, vectors, strict=True):
        _check_vector(name, vector, count)
    columns = [vector.to(torch.int64) for vector in vectors]
    columns += [columns[0].new_full((count,), x.shape[0]) for x in (operand, output)]
    table = all_gather(torch.stack(columns), axes)
    received = torch.ops.spmd.ragged_all_to_all(varying(operand, axes), table, output.shape[0], False, axes)
    is_mine = torch.arange(count, device=table.device) == axis_index(axes)
    places = (table[:, 2] * is_mine).sum(1)
    rows = torch.arange(output.shape[0], device=table.device).unsqueeze(1)
    written = ((rows >= places) & (rows < places + columns[3])).any(1)
    return torch.where(written.view(-1, *[1] * (output.ndim - 1)), received, varying(output, axes))


def _check_rows(operand: Tensor, output: Tensor) -> None:
    """SpmdError unless rows of an operand are rows of an output."""
    for name, x in (("operand", operand), ("output", output)):
        if not isinstance(x, Tensor) or x.ndim == 0:
            got = TensorMeta.of(x) if isinstance(x, Tensor) else type(x).__name__
            raise SpmdError(f"ragged_all_to_all: {name!r} must be a tensor of at least one dim (got {got}).")
    if operand.shape[1:] != output.shape[1:] or operand.dtype != output.dtype:
        raise SpmdError(
            "ragged_all_to_all: 'operand' and 'output' must have one dtype, and shapes that differ in dim 0 only (got "
            f"{TensorMeta.of(operand)} and {TensorMeta.of(output)})."
        )


def _check_vector(name: str, vector: Tensor, count: int) -> None:
    """SpmdError unless offsets or sizes are integers, one for each rank."""
    is_tensor = isinstance(vector, Tensor)
    if not is_tensor or vector.shape != (count,) or vector.dtype not in _INTEGERS:
        got = TensorMeta.of(vector) if is_tensor else type(vector).__name__
        raise SpmdError(
            f"ragged_all_to_all: {name!r} must be an integer vector of length {count}, the number of ranks (got {got})."
        )
