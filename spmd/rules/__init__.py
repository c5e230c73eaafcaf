"""Sharding rules: for every operator, how it can run on shards along one mesh axis.

`RULES` is immutable; `RULES | {my_op: my_rule}` adds to it.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from spmd.ir.call import Call
from spmd.ir.effectful import original
from spmd.rules.builders import along, batched, pointwise, reduction
from spmd.rules.custom import CustomOperator, custom_operator
from spmd.rules.notation import factors
from spmd.rules.ops.attention import ATTENTION
from spmd.rules.ops.convolution import CONVOLUTION
from spmd.rules.ops.counting import COUNTING
from spmd.rules.ops.ctc import CTC
from spmd.rules.ops.elementwise import POINTWISE
from spmd.rules.ops.embedding import EMBEDDING
from spmd.rules.ops.extremes import EXTREMES
from spmd.rules.ops.factories import FACTORIES
from spmd.rules.ops.fourier import FOURIER
from spmd.rules.ops.grouped import GROUPED
from spmd.rules.ops.indexing import INDEXING
from spmd.rules.ops.keyed_draws import KEYED_DRAWS
from spmd.rules.ops.layers import LAYERS
from spmd.rules.ops.linalg import LINALG
from spmd.rules.ops.loss import LAZILY_DEFINED, LOSS
from spmd.rules.ops.manual import MANUAL
from spmd.rules.ops.matmul import MATMUL
from spmd.rules.ops.normalization import NORMALIZATION
from spmd.rules.ops.optimizers import OPTIMIZERS
from spmd.rules.ops.pooling import POOLING
from spmd.rules.ops.random import RANDOM
from spmd.rules.ops.reductions import REDUCTION
from spmd.rules.ops.regions import REGIONS
from spmd.rules.ops.scan import SCAN
from spmd.rules.ops.shape import MOVES, VIEWS
from spmd.rules.ops.softmax import SOFTMAX
from spmd.rules.partial import carry, decreasing, ignores, increasing, linear
from spmd.rules.rule import Body, Factors, Row, Rule, Table
from spmd.rules.strategy import Strategy, derive_strategies
from spmd.rules.without_results import without_results

_FAMILIES = (
    POINTWISE, MATMUL, GROUPED, VIEWS, MOVES, INDEXING, FACTORIES, RANDOM, KEYED_DRAWS, REDUCTION, EXTREMES, SCAN,
    COUNTING, SOFTMAX, NORMALIZATION, ATTENTION, EMBEDDING, LOSS, CTC, LINALG, FOURIER, CONVOLUTION, POOLING, LAYERS,
    MANUAL, OPTIMIZERS, REGIONS,
)  # fmt: skip

RULES: Table = MappingProxyType({op: rule for family in _FAMILIES for op, rule in family.items()})
"""The operators that have a rule of their own; `find_rule` covers the other operators that torch tags as pointwise."""

_POINTWISE = pointwise()


def find_rule(op: torch._ops.OpOverload, rules: Mapping[torch._ops.OpOverload, Rule] = RULES) -> Rule | None:
    """The rule of an operator: its own, else that of pointwise operators if torch tags it as one, else None.

    The tag does not count for operators that are random, mutate arguments, take lists of tensors or return anything
    but tensors.

    Args:
        op: the operator.
        rules: the rules of operators that have their own.

    >>> find_rule(torch.ops.aten.cos.default) is not None
    True
    """
    known = original(op)
    if known is not None:
        rule = rules.get(known)
        return rule if rule is None or known._schema.returns else without_results(rule)
    schema = op._schema
    if op in rules or schema.name in LAZILY_DEFINED:
        return rules.get(op) or LAZILY_DEFINED[schema.name]
    tensors = all(str(value.type) == "Tensor" for value in schema.returns)
    lists = any(str(argument.type) == "List[Tensor]" for argument in schema.arguments)
    random = torch.Tag.nondeterministic_seeded in op.tags
    if torch.Tag.pointwise not in op.tags or random or lists or schema.is_mutable or not tensors:
        return None
    return _POINTWISE


__all__ = [
    "RULES",
    "Body",
    "Call",
    "CustomOperator",
    "Factors",
    "Row",
    "Rule",
    "Strategy",
    "along",
    "batched",
    "carry",
    "custom_operator",
    "decreasing",
    "derive_strategies",
    "factors",
    "find_rule",
    "ignores",
    "increasing",
    "linear",
    "pointwise",
    "reduction",
]
