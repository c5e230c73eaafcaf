"""Embedding bags, pairwise distances and the gradients of grid samplers."""

from __future__ import annotations

from spmd.ir.call import Call
from spmd.rules.builders import requested, zero_results
from spmd.rules.notation import by_call, factors
from spmd.rules.partial import linear
from spmd.rules.rule import Rule, table

_SUM, _MAX = 0, 2  # the modes of an embedding bag


def _bags(call: Call) -> Rule:
    """Columns `d` of the table pass through; the results that say which rows are in which bag do not depend on them."""
    mode = call.argument("mode")
    # Sums and means are linear in the table; sums are linear in the per-sample weights too.
    rows = {_SUM: (linear("weight:0", "per_sample_weights:0"),), _MAX: ()}.get(mode, (linear("weight:0"),))
    return factors(f"_ d, _, _, _ -> _ d, _, _, {'_ d' if mode == _MAX else '_'}", *rows, independent="d")


def _bags_backward(ignored: int) -> Rule:
    """`ignored` is the number of operands between the gradient and the positions of maxima."""

    def choose(call: Call) -> Rule:
        maxima = "_ d" if call.argument("mode") == _MAX else "_"
        return factors(f"_ d{', _' * ignored}, {maxima}, _ -> _ d", linear("grad"))

    return by_call(choose)


def _grid_gradients(call: Call) -> Rule:
    """The image's gradient is a sum over the grid, the grid's a sum over channels.

    torch may return the grid's gradient even if `output_mask` does not request it.
    """
    space = call.operands[1].ndim - 2
    grid, image = " ".join("dhw"[-space:]), f"n c{' _' * space}"
    terms = (image, f"n {grid} _")
    results = ", ".join(terms if len(call.results) == len(terms) else filter(None, requested(call, *terms)))
    pattern = f"n c {grid}, {image}, n {grid} _ -> {results}"
    return factors(pattern, linear("grad_output"), sum=f"c {grid}")


LAYERS = table({
    "_embedding_bag _embedding_bag_forward_only": by_call(_bags),
    "_embedding_bag_backward": _bags_backward(4),
    "_embedding_bag_dense_backward": _bags_backward(3),
    "_embedding_bag_per_sample_weights_backward": factors("_ d, _ d, _, _, _ -> _", linear("grad", "weight"), sum="d"),
    "_pdist_forward": factors("_ _ -> _"),
    "_pdist_backward": factors("_, _ d, _ -> _ d", linear("grad")),
    "grid_sampler_2d_backward grid_sampler_3d_backward": by_call(_grid_gradients, empty=zero_results),
})  # fmt: skip
