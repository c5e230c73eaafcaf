"""The parts of generated functions: where the state is, what holds it, and how the function reads it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import attrs

PRELUDE = """
import argparse, array, collections, dataclasses, enum, functools, itertools, math, os, types
import numpy as np
import torch
from torch import nn

class Settings:
    count = 0
    def __init__(self, scale): self.scale, self.other, self.inner = scale, 0, types.SimpleNamespace(deep=scale)
    def scaled(self, x): return x * self.scale
    @property
    def double(self): return 2 * self.scale
    def __call__(self, x): return x + self.scale

class Child(Settings):
    def scaled(self, x): return super().scaled(x) + 1

class Slotted:
    __slots__ = ("scale", "other")
    def __init__(self, scale): self.scale, self.other = scale, 0

class Dynamic:
    def __init__(self, scale): self.table = {"scale": scale}; self.other = 0
    def __getattr__(self, name):
        if name == "table": raise AttributeError(name)
        return self.table[name]

class Indexed:
    def __init__(self, scale): self.table = {"scale": scale}; self.other = 0
    def __getitem__(self, name): return self.table[name]
    def __len__(self): return len(self.table)
    def __iter__(self): return iter(self.table)

class Lazy:
    def __init__(self, scale): self.base, self.other = scale, 0
    @functools.cached_property
    def scale(self): return self.base

@dataclasses.dataclass
class Data:
    scale: float
    other: int = 0
    items: list = dataclasses.field(default_factory=list)

@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float
    other: int = 0

class Mode(enum.Enum):
    ONE, TWO, THREE, FOUR, FIVE, SIX = range(1, 7)

Pair = collections.namedtuple("Pair", "scale other")

class Layer(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.full((4,), float(scale)))
        self.config = types.SimpleNamespace(deep=[scale])
    def forward(self, x): return x * self.scale

def sgd(scale): return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=float(scale))
def adam(scale): return torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=float(scale), betas=(0.5, 0.9))
def scheduler(scale): return torch.optim.lr_scheduler.ConstantLR(sgd(scale), factor=1.0)
def nested(depth, scale):
    return {"value": scale, "other": 0} if depth == 0 else {"down": nested(depth - 1, scale), "other": 0}
def unrelated(x): return x
"""


@attrs.frozen
class Holder:
    """What holds the state: `{r}` is the object, `{v}` a number.

    Args:
        name: its name in reports.
        make: makes one.
        read: a number or a tensor of it.
        change: changes what is read; "= ..." assigns another object.
        other: changes something that is not read.
        limited: whether it is too large to be compared.
    """

    name: str
    make: str
    read: str
    change: str
    other: str = "pass"
    limited: bool = False


HOLDERS = [
    Holder("number", "{v}.0", "{r}", "= {v}.0"),
    Holder("int", "{v}", "{r}", "= {v}"),
    Holder("text", "'{v}'", "float({r})", "= '{v}'"),
    Holder("enum", "list(Mode)[{v} % 6]", "{r}.value", "= list(Mode)[{v} % 6]"),
    Holder("enum compared", "list(Mode)[{v} % 2]", "(2.0 if {r} is Mode.TWO else 3.0)", "= list(Mode)[{v} % 2]"),
    Holder("attribute", "Settings({v})", "{r}.scale", "{r}.scale = {v}", "{r}.other += 1"),
    Holder("deep attribute", "Settings({v})", "{r}.inner.deep", "{r}.inner.deep = {v}", "{r}.inner.other = {v}"),
    Holder("class attribute", "Settings({v})", "({r}.count + 1)", "Settings.count = {v}", "{r}.other += 1"),
    Holder("property", "Settings({v})", "{r}.double", "{r}.scale = {v}", "{r}.other += 1"),
    Holder("method", "Child({v})", "{r}.scaled(1.0)", "{r}.scale = {v}", "{r}.other += 1"),
    Holder("callable", "Settings({v})", "{r}(1.0)", "{r}.scale = {v}", "{r}.other += 1"),
    Holder("bound method", "Settings({v}).scaled", "{r}(1.0)", "{r}.__self__.scale = {v}", "{r}.__self__.other += 1"),
    Holder("slots", "Slotted({v})", "{r}.scale", "{r}.scale = {v}", "{r}.other += 1"),
    Holder("__getattr__", "Dynamic({v})", "{r}.scale", "{r}.table['scale'] = {v}", "{r}.other += 1"),
    Holder("__getitem__", "Indexed({v})", "{r}['scale']", "{r}.table['scale'] = {v}", "{r}.other += 1"),
    Holder("cached property", "Lazy({v})", "{r}.scale", "= Lazy({v})", "{r}.other += 1"),
    Holder("dataclass", "Data({v})", "{r}.scale", "{r}.scale = {v}", "{r}.items.append(1)"),
    Holder("frozen", "Frozen({v})", "{r}.scale", "= dataclasses.replace({r}, scale={v})",
           "= dataclasses.replace({r}, other={r}.other + 1)"),
    Holder("namedtuple", "Pair({v}, 0)", "{r}.scale", "= {r}._replace(scale={v})", "= {r}._replace(other={v})"),
    Holder("namespace", "types.SimpleNamespace(scale={v})", "{r}.scale", "{r}.scale = {v}", "{r}.other = {v}"),
    Holder("argparse", "argparse.Namespace(scale={v})", "{r}.scale", "{r}.scale = {v}", "{r}.other = {v}"),
    Holder("vars", "Settings({v})", "vars({r})['scale']", "{r}.scale = {v}"),
    Holder("hasattr", "types.SimpleNamespace(a=1)", "(2.0 if hasattr({r}, 'b') else 3.0)",
           "delattr({r}, 'b') if hasattr({r}, 'b') else setattr({r}, 'b', 1)", "{r}.c = {v}"),
    Holder("getattr default", "types.SimpleNamespace(a=1)", "getattr({r}, 'b', 5.0)", "{r}.b = {v}", "{r}.c = {v}"),
    Holder("dict", "{{'scale': {v}, 'other': 0}}", "{r}['scale']", "{r}['scale'] = {v}", "{r}['other'] += 1"),
    Holder("dict get", "{{'other': 0}}", "{r}.get('scale', 7.0)", "{r}['scale'] = {v}", "{r}['other'] += 1"),
    Holder("dict in", "{{'other': 0}}", "(2.0 if 'scale' in {r} else 1.0)",
           "{r}.pop('scale', None) or {r}.update(scale=1)", "{r}['other'] += 1"),
    Holder("dict items", "{{'a': {v}, 'b': 1}}", "sum(v for k, v in {r}.items())", "{r}['a'] = {v}"),
    Holder("dict loop", "{{'a': {v}, 'b': 1}}", "sum({r}[k] for k in {r})", "{r}['c'] = {v}"),
    Holder("four deep", "nested(4, {v})", "{r}['down']['down']['down']['down']['value']",
           "{r}['down']['down']['down']['down']['value'] = {v}", "{r}['down']['down']['other'] = {v}"),
    Holder("computed key", "{{'k0': {v}, 'k1': 2, 'n': 0}}", "{r}['k' + str({r}['n'])]", "{r}['k0'] = {v}"),
    Holder("formatted key", "{{'k0': {v}, 'k1': 2, 'n': 0}}", "{r}[f\"k{{{r}['n']}}\"]", "{r}['k0'] = {v}",
           "{r}['k1'] += 1"),
    Holder("defaultdict", "collections.defaultdict(float, scale={v})", "{r}['scale']",
           "{r}['scale'] = {v}", "{r}['o'] += 1"),
    Holder("OrderedDict", "collections.OrderedDict(scale={v})", "{r}['scale']", "{r}['scale'] = {v}", "{r}['o'] = {v}"),
    Holder("Counter", "collections.Counter(scale={v})", "{r}['scale']",
           "{r}['scale'] = {v}", "{r}['o'] += 1"),
    Holder("UserDict", "collections.UserDict(scale={v})", "{r}['scale']", "{r}['scale'] = {v}", "{r}['o'] = {v}"),
    Holder("ChainMap", "collections.ChainMap({{}}, {{'scale': {v}}})", "{r}['scale']", 
           "{r}['scale'] = {v}", "{r}['o'] = 1"),
    Holder("list", "[{v}, 1]", "{r}[0]", "{r}[0] = {v}", "{r}[1] += 1"),
    Holder("list sum", "[{v}, 1]", "sum({r})", "{r}.append({v})"),
    Holder("list len", "[{v}, 1]", "len({r})", "{r}.append({v})", "{r}[0] += 1"),
    Holder("list of 100", "[float({v})] * 100", "sum({r})", "{r}[{v} % 100] += 3"),
    Holder("list of 100, one", "[float({v})] * 100", "{r}[70]", "{r}[70] = {v}", "{r}[69] += 1"),
    Holder("list of 3000", "[float({v})] * 3000", "sum({r})", "{r}[{v} % 3000] += 3"),
    Holder("list of 20000", "[float({v})] * 20000", "sum({r})", "{r}[{v} % 20000] += 3", limited=True),
    Holder("list loop", "[Settings({v}), Settings(1)]", "sum(s.scale for s in {r})",
           "{r}[0].scale = {v}", "{r}[1].other += 1"),
    Holder("unpacked", "[{v}, (1, 2)]", "(lambda a, b: a * b[0])(*{r})", "{r}[0] = {v}"),
    Holder("deque", "collections.deque([{v}, 1])", "{r}[0]", "{r}[0] = {v}"),
    Holder("set", "{{'a', 'b'}}", "(2.0 if 'scale' in {r} else 1.0)", "{r}.symmetric_difference_update({{'scale'}})"),
    Holder("array", "np.array([{v}.0, 1.0])", "float({r}[0])", "{r}[0] = {v}"),
    Holder("array of 100", "np.full(100, {v}.0)", "float({r}.sum())", "{r}[50] += {v}"),
    Holder("large array", "np.full(100_000, {v}.0)", "float({r}.sum())", "{r}[50] += {v}", limited=True),
    Holder("array.array", "array.array('d', [{v}, 1])", "{r}[0]", "{r}[0] = {v}"),
    Holder("tensor", "torch.full((4,), {v}.0)", "{r}", "= torch.full((4,), {v}.0)"),
    Holder("tensor written", "torch.full((4,), {v}.0)", "{r}", "{r}.fill_({v})"),
    Holder("tensor's shape", "torch.ones({v} % 5 + 1)", "{r}.shape[0]", "= torch.ones({v} % 5 + 1)", "{r}.add_(1)"),
    Holder("item of a tensor", "torch.full((4,), {v}.0)", "{r}[0].item()", "{r}.fill_({v})"),
    Holder("80 tensors", "{{n: torch.full((4,), float({v} + n)) for n in range(80)}}", "{r}[79]",
           "{r}[79] = torch.full((4,), {v}.0)", "{r}[3] = torch.zeros(4)"),
    Holder("sum of 80 tensors", "{{n: torch.full((4,), float({v} + n)) for n in range(80)}}", "sum({r}.values())",
           "{r}[79] = torch.full((4,), {v}.0)"),
    Holder("module", "Layer({v})", "{r}(1.0)", "{r}.scale = {v}"),
    Holder("module's parameter", "Layer({v})", "{r}.weight", "nn.init.constant_({r}.weight, {v})"),
    Holder("module's config", "Layer({v})", "{r}.config.deep[0]", "{r}.config.deep[0] = {v}"),
    Holder("sgd", "sgd({v})", "{r}.param_groups[0]['lr']", "{r}.param_groups[0]['lr'] = {v}.0",
           "{r}.param_groups[0]['momentum'] += 1"),
    Holder("adam", "adam({v})", "sum(g['lr'] for g in {r}.param_groups)", "{r}.param_groups[0]['lr'] = {v}.0",
           "{r}.param_groups[0]['eps'] *= 2"),
    Holder("scheduler", "scheduler({v})", "{r}.get_last_lr()[0]", "{r}._last_lr = [{v}.0]", "{r}.last_epoch += 1"),
    Holder("scaler", "torch.amp.GradScaler('cpu', init_scale=float({v}))", "{r}.get_scale()",
           "{r}._scale = torch.full((), {v}.0)", "{r}._growth_interval = 10 + {v}"),
    Holder("distribution", "torch.distributions.Normal(torch.tensor({v}.0), torch.tensor(1.0), validate_args=False)",
           "{r}.mean", "{r}.loc = torch.tensor({v}.0)"),
    Holder("environment", "os.environ", "float(os.environ.get('SPMD_TEST_SCALE', '1'))",
           "os.environ['SPMD_TEST_SCALE'] = '{v}'", "os.environ['SPMD_TEST_OTHER'] = '{v}'"),
    Holder("getenv", "os.environ", "float(os.getenv('SPMD_TEST_SCALE', '1'))",
           "os.environ['SPMD_TEST_SCALE'] = '{v}'", "os.environ['SPMD_TEST_OTHER'] = '{v}'"),
    Holder("function", "(lambda x: x + {v})", "{r}(1.0)", "= (lambda x: x + {v})"),
    Holder("partial", "functools.partial(max, {v})", "{r}(1.0)", "= functools.partial(max, {v})"),
    Holder("library function", "[math.sin, math.cos][{v} % 2]", "{r}(1.0)", "= [math.sin, math.cos][{v} % 2]"),
]  # fmt: skip


@attrs.frozen
class Place:
    """Where the function finds the holder: statements that put `{make}` there, its expression, and an assignment."""

    name: str
    setup: str
    read: str
    assign: str
    closure: bool = False


PLACES = [
    Place("global", "ROOT = {make}", "ROOT", "ROOT = {new}"),
    Place("closure", "root = {make}", "root", "assign({new})", closure=True),
    Place("attribute", "APP = types.SimpleNamespace(root={make}, other=0)", "APP.root", "APP.root = {new}"),
    Place("item", "TABLE = {{'root': {make}, 'other': 0}}", "TABLE['root']", "TABLE['root'] = {new}"),
    Place("item of a row", "ROW = [0, {make}]", "ROW[1]", "ROW[1] = {new}"),
    Place("class", "class Box:\n    pass\nBox.root = {make}", "Box.root", "Box.root = {new}"),
    Place("object in a closure", "root = Data({make})", "root.scale", "root_of().scale = {new}", closure=True),
]

WAYS = {
    "direct": "return x * READ",
    "local": "found = PLACE\n    return x * READ_found",
    "helper": "return helper(x, PLACE)",
    "helper's global": "return scaled(x)",
    "inner": "def inner(y):\n        return y * READ\n    return inner(x)",
    "lambda": "return (lambda y: y * READ)(x)",
    "comprehension": "return sum([x * READ for _ in range(2)])",
    "grad": "return torch.func.grad(lambda y: (y * READ).sum())(x)",
    "map": "return sum(map(lambda y: y * READ, [x, x]))",
    "condition": "return x * READ if unrelated(True) else x",
    "loop": "for _ in range(2):\n        x = x * READ\n    return x",
    "try": "try:\n        return x * READ\n    except KeyError:\n        return x",
    "with": "with torch.no_grad():\n        return x * READ",
    "decorated": "return wrapped(x)",
}


@attrs.frozen
class Case:
    """One generated function.

    Args:
        name: its parts.
        source: its module, in which `f` is the function.
        change, other: statements that change what it reads, and what it does not; `{v}` is a number.
        same: a statement that puts an equal object in the place.
        limited: whether it may be warned of.
    """

    name: str
    source: str
    change: str
    other: str
    same: str | None
    limited: bool


def case_of(holder: Holder, place: Place, way: str) -> Case:
    """The function that reads a holder from a place in a way."""
    read = holder.read.format(r=place.read, v="{v}")
    body = WAYS[way].replace("READ_found", f"({holder.read.format(r='found', v='{v}')})")
    body = body.replace("READ", f"({read})").replace("PLACE", place.read)
    helpers = f"def helper(x, root):\n    return x * ({holder.read.format(r='root', v='{v}')})\n"
    own = f"def scaled(x):\n    return x * ({read})\n"
    own += "def decorate(g):\n    @functools.wraps(g)\n    def call(x):\n        return g(x)\n    return call\n"
    own += f"@decorate\ndef wrapped(x):\n    return x * ({read})\n"
    function = f"{own}def f(x):\n    {body}\n"
    setup = place.setup.format(make=holder.make.format(v=1))
    if place.closure:
        inner = "\n".join(f"    {line}" for line in [*setup.splitlines(), *function.splitlines()])
        inner += "\n    def assign(value):\n        nonlocal root\n        root = value\n"
        inner += "    def root_of():\n        return root\n"
        text = f"{PRELUDE}{helpers}def make():\n{inner}\n    return f, assign, root_of\nf, assign, root_of = make()\n"
        target = "root_of().scale" if "object" in place.name else "root_of()"
    else:
        text, target = f"{PRELUDE}{helpers}{setup}\n{function}", place.read

    def statement(form: str) -> str:
        if form.startswith("= "):
            return place.assign.format(new=form[2:].format(r=target, v="{v}"))
        return form.format(r=target, v="{v}")

    fresh = holder.make.format(v="{v}") if holder.change.startswith("=") and "lambda" not in holder.make else None
    same = None if fresh is None or holder.name in ("cached property",) else place.assign.format(new=fresh)
    return Case(
        f"{holder.name} | {place.name} | {way}",
        text,
        statement(holder.change),
        statement(holder.other),
        same,
        holder.limited,
    )


def cases(seed: int, count: int) -> Iterator[Case]:
    """So many functions, in an order of their own for each seed."""
    every = list(itertools.product(HOLDERS, PLACES, WAYS))
    random.Random(seed).shuffle(every)
    return itertools.islice((case_of(*parts) for parts in every), count)
