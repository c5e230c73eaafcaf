"""What a program makes by itself is on the mesh's device; `meta` stands for a GPU."""

import pytest
import torch

import spmd
from spmd import P
from spmd.collectives import axis_index, shard_offset
from spmd.collectives.local import bind_local

MESH = spmd.make_mesh({"x": 2}, runtime="virtual", device="meta")


def devices(results):
    return {shard.device.type for result in results for shard in result.shards}


def test_factories_and_constants_are_on_the_device_of_the_mesh():
    table = torch.arange(4.0)

    @spmd.jit(P("x"), mesh=MESH)
    def function(x):
        return x + torch.arange(4), torch.zeros(4), torch.rand(3), x + torch.tensor([1.0, 2.0, 3.0, 4.0]), table.to(x)

    x = spmd.distribute(torch.ones(4), P("x"), MESH)
    assert {"meta"} == devices(function(x))


def test_the_index_of_a_rank_is_made_by_its_device():
    def body(x):
        index, offset = axis_index("x"), shard_offset(4, "x")
        return x * index + offset, torch.stack([index, offset])[None]

    x = spmd.distribute(torch.ones(4), P("x"), MESH)
    assert {"meta"} == devices(spmd.shard_map(body, MESH, P("x"), P("x"))(x))


@pytest.mark.parametrize(
    ("op", "args"), [(torch.ops.spmd.axis_index.default, ()), (torch.ops.spmd.shard_offset.default, (4,))]
)
def test_an_index_is_not_copied_from_the_host(op, args):
    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.overloadpacket)
            return func(*args, **kwargs or {})

    called = []
    call = bind_local(op, MESH, 1, *args, ["x"])
    with Recorder():
        first, second = call(), call()
    assert [torch.ops.aten.full] * 2 == called
    assert first is not second and torch.device("meta") == first.device and torch.int64 is first.dtype
