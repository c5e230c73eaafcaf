"""The errors that users meet, by their text."""

from __future__ import annotations

import inspect
import re
import types
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import spmd
from spmd import P, Shard
from spmd.api.programs.missing_rules import MissingRuleWarning
from spmd.rules import RULES

MESH = spmd.make_mesh({"data": 2, "model": 4}, runtime="virtual")
MM = torch.ops.aten.mm.default


def line_of(function: Any, text: str) -> str:
    """`file.py:LINE` of the line of a function that holds a text."""
    lines, first = inspect.getsourcelines(function)
    return f"test_errors.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


def identity(*args: Any) -> Any:
    return args[0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            P("batch"),
            r"argument 0\['w'\] f32\[8,6\]: Unknown mesh axis 'batch' in P\('batch'\): Mesh\(data=2, model=4\)",
        ),
        (P(None, None, "data"), r"argument 0\['w'\] f32\[8,6\]: P\(None, None, 'data'\) names 3 dims but the tensor"),
        ((Shard(0),), r"argument 0\['w'\] f32\[8,6\]: Expected one placement for each of the 2 axes"),
        (P(partial={"batch": "sum"}), r"argument 0\['w'\].*Unknown mesh axis 'batch'"),
    ],
)
def test_spec_that_does_not_fit_its_argument(spec: Any, message: str) -> None:
    f = spmd.jit(identity, ({"w": spec},), P(), mesh=MESH)
    with pytest.raises(spmd.ShardingError, match=message):
        f({"w": torch.ones(8, 6)})


def test_axis_used_twice() -> None:
    with pytest.raises(spmd.ShardingError, match=r"Mesh axis 'data' is used twice in P\('data', 'data'\)"):
        P("data", "data")
    with pytest.raises(spmd.ShardingError, match="Mesh axis 'data' is used twice"):
        P("data", partial={"data": "sum"})


@pytest.mark.parametrize(
    ("in_specs", "message"),
    [
        (({"v": P()}, P()), r"in_specs does not fit the arguments at 0: expected one spec or a dict with keys 'w'"),
        (
            (P(), P(), P()),
            r"in_specs does not fit the arguments: expected one spec or a tuple of 2 \(got a tuple of 3",
        ),
        (("data", P()), r"in_specs does not fit the arguments at 0: 'data' is not a spec. Write P\('data'\)"),
    ],
)
def test_spec_tree_that_is_no_prefix(in_specs: Any, message: str) -> None:
    f = spmd.jit(identity, in_specs, P(), mesh=MESH)
    with pytest.raises(spmd.ShardingError, match=message):
        f({"w": torch.ones(8, 6)}, torch.ones(3))


def test_out_specs_that_are_no_prefix_of_the_result() -> None:
    f = spmd.jit(lambda x: {"y": x}, P(), {"z": P()}, mesh=MESH)
    with pytest.raises(spmd.ShardingError, match=r"out_specs does not fit the result: expected one spec or a dict"):
        f(torch.ones(3))
    f = spmd.jit(lambda x: {"y": x}, P(), {"y": P("data", "model")}, mesh=MESH)
    with pytest.raises(spmd.ShardingError, match=r"result \['y'\] f32\[3\]: P\('data', 'model'\) names 2 dims"):
        f(torch.ones(3))


def test_dtensor_with_another_spec() -> None:
    f = spmd.jit(identity, ({"w": P(None, "model")},), P(), mesh=MESH)
    value = spmd.distribute(torch.ones(8, 6), P("data"), MESH)
    with pytest.raises(spmd.ShardingError) as caught:
        f({"w": value})
    here = line_of(test_dtensor_with_another_spec, 'f({"w": value})')
    assert str(caught.value) == (
        "argument 0['w'] f32[8,6] has spec P('data') but in_specs says P(None, 'model'): "
        "dim 0 (size 8) has axes ('data',) in the value given and () in in_specs; "
        "dim 1 (size 6) has axes () in the value given and ('model',) in in_specs.\n"
        f"  {here} (`f({{\"w\": value}})`). Pass value.redistribute(P(None, 'model')), or change in_specs to P('data')."
    )
    assert f({"w": value.redistribute(P(None, "model"))})["w"].shape == (8, 6)
    with pytest.raises(spmd.ShardingError, match="has spec P\\('data'\\) but in_specs says"):
        f({"w": value})


def test_partial_where_it_cannot_be() -> None:
    f = spmd.jit(identity, P(partial={"data": "sum"}), P(), mesh=MESH)
    with pytest.raises(spmd.ShardingError, match=r"argument 0 b8\[3\]: .*cannot be partial over 'data'"):
        f(torch.ones(3, dtype=torch.bool))
    with pytest.raises(spmd.ShardingError, match=r"must be one of sum, max, min \(got 'mean'\)"):
        P(partial={"data": "mean"})  # type: ignore[dict-item]


def test_meshes_that_differ() -> None:
    other = spmd.make_mesh({"data": 8}, runtime="virtual")
    f = spmd.jit(identity, (P("data"), P()), P(), mesh=MESH)
    value = spmd.distribute(torch.ones(8), P("data"), other)
    message = r"argument 0 f32\[8\] is on Mesh\(data=8\), but the function runs on Mesh\(data=2, model=4\)"
    with pytest.raises(spmd.MeshError, match=message):
        f(value, torch.ones(2))


def test_nested_functions_on_two_meshes() -> None:
    inner = spmd.jit(identity, P(), P(), mesh=spmd.make_mesh({"data": 8}, runtime="virtual"))
    outer = spmd.jit(lambda x: inner(x), P(), P(), mesh=MESH)
    with pytest.raises(spmd.MeshError, match=r"was made for Mesh\(data=8\) and is called .* on Mesh\(data=2, model="):
        outer(torch.ones(2))


def test_no_mesh() -> None:
    with pytest.raises(spmd.MeshError, match=r"No mesh was given and none is set. Pass mesh=... or enter"):
        spmd.jit(identity, P(), P())(torch.ones(2))


def reads_a_value(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def branches_on_a_value(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def has_a_shape_from_values(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def writes_to_its_argument(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (reads_a_value, ".item()"),
        (branches_on_a_value, "if x.sum()"),
        (has_a_shape_from_values, "x[x > 0]"),
        (writes_to_its_argument, "x.add_(1)"),
    ],
)
def test_what_no_static_program_can_do(function: Any, line: str) -> None:
    f = spmd.jit(function, P("data"), P("data"), mesh=MESH)
    with pytest.raises(spmd.TraceError, match=re.escape(line_of(function, line))):
        f(torch.ones(4))


def test_result_that_is_no_tensor() -> None:
    f = spmd.jit(lambda x: {"y": x, "n": len}, P(), P(), mesh=MESH)
    with pytest.raises(spmd.TraceError, match=r"Result\['n'\] must be a tensor or a number \(got builtin"):
        f(torch.ones(4))


def test_argument_that_is_no_tensor() -> None:
    f = spmd.jit(identity, P(), P(), mesh=MESH)
    with pytest.raises(spmd.SpmdError, match=r"(?i)argument 1 .*got object"):
        f(torch.ones(4), object())


def test_communication_where_it_is_forbidden() -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sum()

    f = spmd.jit(total, P("data"), P(), mesh=MESH, comms="error")
    with pytest.raises(spmd.PlanError) as caught:
        f(torch.ones(4))
    first, comm, pin, remedy = str(caught.value).splitlines()
    assert first == "comms='error' forbids what the plan of total does:"
    assert comm.startswith("  all_reduce over data, 4 bytes: sum produces P(partial={'data': 'sum'}),")
    assert comm.endswith(f"at {line_of(total, 'x.exp().sum()')}")
    advice = "    to avoid it, give result 0 out_specs P(partial={'data': 'sum'}): "
    assert pin == f"{advice}-0.5 us and -4 bytes a step, +0 bytes held"
    assert remedy.endswith("or allow it: comms='allow'.")


def test_operator_without_a_rule_where_communication_is_forbidden() -> None:
    @torch.library.custom_op("spmd_tests::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.sort().values

    opaque.register_fake(torch.empty_like)

    def f(x: torch.Tensor) -> torch.Tensor:
        return opaque(x)

    g = spmd.jit(f, P(), P(), mesh=MESH, comms="error")
    place = line_of(f, "return opaque(x)")
    with pytest.raises(spmd.PlanError, match=rf"spmd_tests\.opaque\.default has no sharding rule .* at {place}"):
        g(torch.ones(4))
    allowed = spmd.jit(f, P("data"), P("data"), mesh=MESH)
    with pytest.warns(MissingRuleWarning, match="has no sharding rule and runs replicated"):
        allowed.plan(torch.ones(3))
    assert torch.equal(allowed(torch.tensor([3.0, 1.0, 2.0])).full_tensor(), torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own forward-mode differentiation
def test_called_under_a_transform() -> None:
    g = spmd.jit(lambda x: x.sin(), P(), P(), mesh=MESH)
    with pytest.raises(spmd.TraceError, match=r"called while make_fx records, at test_errors.py:\d+"):
        make_fx(lambda x: g(x))(torch.ones(4))
    y = spmd.distribute(torch.ones(4), P("data"), MESH)
    with pytest.raises(spmd.TraceError, match=r"called on DTensors while make_fx records"):
        make_fx(lambda x: x * y)(torch.ones(4))
    x = torch.ones(4)
    with pytest.raises(
        spmd.TraceError, match=r"closes over a tensor on which .*at test_errors.py:\d+.*Pass it as an argument"
    ):
        torch.func.grad(lambda y: spmd.jit(lambda x: x * y, P(), P(), mesh=MESH)(x).sum())(torch.ones(4))


def test_meta_tensor_in_a_call() -> None:
    f = spmd.jit(identity, P(), P(), mesh=MESH)
    with pytest.raises(spmd.ShardingError, match=r"argument 0 f32\[4\] is a meta tensor, which has no data"):
        f(torch.empty(4, device="meta"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"comms": "never"}, r"comms must be one of 'allow', 'error' or a mapping .* \(got 'never'\)"),
        ({"backend": "xla"}, r"backend must be one of 'eager', 'inductor' \(got 'xla'\)"),
        ({"backend": "inductor"}, r"backend='inductor' is not available yet. Use backend='eager'"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(spmd.PlanError, match=message):
        spmd.jit(identity, P(), P(), mesh=MESH, **options)


def test_specs_that_are_given_twice() -> None:
    with pytest.raises(spmd.PlanError, match=r"jit takes in_specs and out_specs once.*Write @spmd.jit\(in_specs, "):
        spmd.jit(identity, P(), P(), P())  # type: ignore[call-overload]


@pytest.mark.parametrize("option", ["static_argnums", "donate_argnums"])
def test_argument_numbers_out_of_range(option: str) -> None:
    f = spmd.jit(identity, P(), P(), mesh=MESH, **{option: 3})  # type: ignore[call-overload]
    with pytest.raises(spmd.TraceError, match=rf"{option}=\(3,\) names argument 3, but the call has 1 arguments"):
        f(torch.ones(2))


def test_static_argument_that_is_not_hashable() -> None:
    f = spmd.jit(lambda x, sizes: x, P(), P(), mesh=MESH, static_argnums=1)
    with pytest.raises(spmd.TraceError, match=r"must be hashable \(got \[\[1, 2\]\]\)"):
        f(torch.ones(2), [1, 2])


def test_errors_do_not_poison_the_cache() -> None:
    fail = [True]

    def f(x: torch.Tensor) -> torch.Tensor:
        if fail[0]:
            raise ValueError("the user's own")
        return x

    g = spmd.jit(f, P(), P(), mesh=MESH)
    with pytest.raises(ValueError, match="the user's own"):
        g(torch.ones(2))
    fail[0] = False
    assert g(torch.ones(2)).shape == (2,)


def two_tensors(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def test_arguments_by_name_take_their_places() -> None:
    x, w = torch.randn(4, 3), torch.randn(3, 2)
    f = spmd.jit(two_tensors, (P("data"), P()), P("data"), mesh=MESH)
    for result in (f(x, w=w), f(w=w, x=x)):
        torch.testing.assert_close(result.full_tensor(), x @ w)
    assert f.lower(x, w=w).as_text() == f.lower(x, w).as_text()
    outer = spmd.jit(lambda x, w: f(w=w, x=x), (P(), P()), P(), mesh=MESH)
    torch.testing.assert_close(outer(x, w).full_tensor(), x @ w)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, x: f(x), r"two_tensors\) takes \(x: .*: missing a required argument: 'w'"),
        (lambda f, x: f(x, x, x), r"two_tensors\) takes \(x: .*: too many positional arguments"),
        (lambda f, x: f(x, v=x), r"two_tensors\) takes \(x: .*: (missing a required|got an unexpected)"),
    ],
)
def test_calls_that_do_not_fit_the_signature(call: Any, message: str) -> None:
    f = spmd.jit(two_tensors, P(), P(), mesh=MESH)
    with pytest.raises(spmd.TraceError, match=message):
        call(f, torch.ones(4, 4))


class Unregistered:
    pass


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (len, r"got builtin_function.*Pass a tensor; or, to a jitted function, a static argument: static_argnums"),
        (slice(0, 2), r"got slice .*in a dict, list or dataclass; or, .* a static argument: static_argnums"),
        (types.SimpleNamespace(w=1), r"got SimpleNamespace .*Pass tensors in a dict"),
        (Unregistered(), r"got Unregistered .*register Unregistered with optree as a container: namespace='spmd'"),
    ],
)
def test_arguments_of_other_kinds(leaf: Any, message: str) -> None:
    f = spmd.jit(identity, P(), P(), mesh=MESH)
    with pytest.raises(spmd.ShardingError, match=r"argument 0\['a'\] is no tensor \(" + message):
        f({"a": leaf})


def test_static_tensors() -> None:
    f = spmd.jit(identity, P(), P(), mesh=MESH, static_argnums=1)
    with pytest.raises(spmd.TraceError, match=r"Static argument 1 of .* holds a tensor \(got tuple\)"):
        f(torch.ones(2), (torch.ones(2),))


def test_specs_of_static_arguments() -> None:
    f = spmd.jit(identity, (P(), None), P(), mesh=MESH, static_argnums=1)
    with pytest.raises(spmd.ShardingError, match="in_specs does not fit the arguments that are not static: expected"):
        f(torch.ones(2), 3)


def test_closed_over_dtensors() -> None:
    closed = spmd.distribute(torch.ones(4), P("data"), MESH)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + closed

    with pytest.raises(spmd.TraceError, match=rf"at {line_of(f, 'x + closed')} .*closes over. Pass it as an argument"):
        spmd.jit(f, P(), P(), mesh=MESH)(torch.ones(4))
    with pytest.raises(spmd.TraceError, match=r"closes over a DTensor f32\[4\] that cannot be a constant"):
        spmd.jit(lambda x: (x, closed), P(), P(), mesh=MESH)(torch.ones(4))


def test_modules_of_torch_have_the_line_of_their_call() -> None:
    f = spmd.jit(torch.nn.Embedding(4, 2, max_norm=1.0), P(), P(), mesh=MESH)
    with pytest.raises(
        spmd.TraceError, match=r"In-place write to argument self.weight f32\[4,2\] at test_errors.py:\d+ "
    ):
        f(torch.ones(4, dtype=torch.int64))


@pytest.mark.parametrize(
    "use",
    [
        lambda mesh: spmd.jit(identity, P(), P(), mesh=mesh),
        lambda mesh: spmd.distribute(torch.ones(2), P(), mesh),
        lambda mesh: spmd.use_mesh(mesh).__enter__(),
    ],
)
def test_what_is_no_mesh(use: Any) -> None:
    with pytest.raises(spmd.MeshError, match=r"mesh must be a Mesh \(got dict {'data': 2}\). Make one: spmd.make_mesh"):
        use({"data": 2})


@pytest.mark.parametrize("device", ["bogus", "cuda:99"])
def test_devices_that_there_are_not(device: str) -> None:
    with pytest.raises(spmd.MeshError, match=r"device must be one of torch's|is not available here"):
        spmd.make_mesh({"data": 2}, runtime="virtual", device=device)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"machine": "h100"}, spmd.PlanError, r"machine must be a spmd.Machine \(got 'h100'\)"),
        ({"rules": [1]}, spmd.RuleError, r"rules must map operators to spmd.rules.Rule \(got \[1\]\)"),
        (
            {"rules": {MM: "i k, k j -> i j"}},
            spmd.RuleError,
            r"rules\[aten.mm.default\] must .*\(got str 'i k.*factors\(",
        ),
        (
            {"rules": RULES | {MM: lambda call: None}},
            spmd.RuleError,
            r"rules\[aten.mm.default\] .*\(got function <func",
        ),
        ({"rules": RULES | {torch.ops.aten.mm: RULES[MM]}}, spmd.RuleError, r"key of .*Write .*torch.ops.aten.mm.def"),
        (
            {"rules": RULES | {torch.mm: RULES[MM]}},
            spmd.RuleError,
            r"key of rules .*\(got builtin_function_or_method <b",
        ),
        ({"rules": RULES | {"mm": RULES[MM]}}, spmd.RuleError, r"key of rules must be one overload .*\(got str 'mm'\)"),
        ({"static_argnums": "n"}, spmd.TraceError, r"Argument numbers are positions .*\(got 'n'\)"),
        ({"static_argnums": None}, spmd.TraceError, r"Argument numbers are positions .*\(got None\)"),
        ({"donate_argnums": 1.0}, spmd.TraceError, r"Argument numbers are positions .*\(got 1.0\)"),
        ({"donate_argnums": True}, spmd.TraceError, r"Argument numbers are positions .*\(got True\)"),
        ({"static_argnames": 3}, spmd.TraceError, r"static_argnames must be names of parameters \(got 3\)"),
        ({"keep_sharded": {0: 3}}, spmd.PlanError, r"keep_sharded\['0'\] must be a mesh axis, .* \(got \(3,\)\)"),
        ({"keep_sharded": {"x": None}}, spmd.PlanError, r"keep_sharded\['x'\] must be a mesh axis, .*None"),
    ],
)
def test_options_of_other_types(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        spmd.jit(identity, P(), P(), mesh=MESH, **options)


def test_mesh_by_position() -> None:
    with pytest.raises(spmd.PlanError, match="jit takes the mesh by name"):
        spmd.jit(identity, P(), P(), MESH)  # type: ignore[call-overload]


def test_a_tensor_of_tensors() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([x.sum(), 1.0])

    place = re.escape(line_of(f, "torch.tensor"))
    with pytest.raises(spmd.TraceError, match=rf"torch.tensor of a list of tensors at {place} .*Use torch.stack"):
        spmd.jit(f, P(), P(), mesh=MESH)(torch.ones(4))


def test_sparse_tensors() -> None:
    with pytest.raises(spmd.ShardingError, match=r"argument 0 must be dense \(got layout torch.sparse_coo\)"):
        spmd.jit(identity, P(), P(), mesh=MESH)(torch.ones(4).to_sparse())


@pytest.mark.parametrize("spec", ["data", None])
def test_specs_that_are_none_to_redistribute(spec: Any) -> None:
    with pytest.raises(spmd.ShardingError, match=rf"{spec!r} is not a spec. Write P\("):
        spmd.distribute(torch.ones(4), P(), MESH).redistribute(spec)
