"""Pooling, padding and resampling: batch and channels pass through, shards of spatial dims exchange their borders."""

from __future__ import annotations

from spmd.ir.call import Call
from spmd.rules.builders import batched, empty_results, rule
from spmd.rules.notation import factors, spell
from spmd.rules.ops.sampling import sample, sample_backward
from spmd.rules.ops.sliding import average, average_backward, largest, largest_backward
from spmd.rules.partial import carry, ignores, linear
from spmd.rules.rule import Factors, Rule, table

_INTERPOLATORS = {
    1: "upsample_linear1d",
    2: "upsample_bilinear2d upsample_bicubic2d",
    3: "upsample_trilinear3d",
}


def _names(pattern: str, words: str) -> str:
    """`pattern` with each of `words` in place of its `*`."""
    return " ".join(pattern.replace("*", word) for word in words.split())


def _fractional(n: int) -> Rule:
    """The samples have a batch dim even if the image has none; then only its first item is used."""
    space = " _" * n

    def make(call: Call) -> Factors:
        item, sample = ("b c", "b c _") if call.operands[0].ndim == n + 2 else ("c", "_ c _")
        return spell(call, [item + space, sample], [item + space] * 2)

    return rule(make, empty=empty_results)


def _spatial(n: int) -> dict[str, Rule]:
    """The rules of the operators on `n` spatial dims."""
    forward, copies = (batched(f"{n}", f"{n}", flow("self"), sample) for flow in (linear, carry))
    backward = batched(f"{n} {n}", f"{n}", linear("grad_output"), ignores("self"), sample_backward)
    nearest = _names(f"*{n}d", "upsample_nearest _upsample_nearest_exact")
    resized = batched(f"{n}", f"{n}", linear("grad_output"), sample_backward, size_argument=2)
    found = {
        _names(f"*_pad{n}d", "reflection replication"): copies,
        _names(f"*_pad{n}d_backward", "reflection replication"): backward,
        _INTERPOLATORS[n]: forward,
        nearest: copies,
        _names("*_backward", f"{_INTERPOLATORS[n]} {nearest}"): resized,
    }
    if n == 1:
        return found
    averaged, adaptive = (batched(f"{n}", f"{n}", linear("self"), average, *more) for more in ((), (sample,)))
    averaged_backward, adaptive_backward = (
        batched(f"{n} {n}", f"{n}", linear("grad_output"), ignores("self"), average_backward, *more)
        for more in ((), (sample_backward,))
    )
    indexed = f"{n} {n} {n}", f"{n}", linear("grad_output"), ignores("self")
    return found | {
        f"avg_pool{n}d": averaged,
        f"avg_pool{n}d_backward": averaged_backward,
        f"_adaptive_avg_pool{n}d": adaptive,
        f"_adaptive_avg_pool{n}d_backward": adaptive_backward,
        f"max_pool{n}d_with_indices adaptive_max_pool{n}d": batched(f"{n}", f"{n} {n}", largest),
        f"fractional_max_pool{n}d": _fractional(n),
        f"fractional_max_pool{n}d_backward": batched(*indexed),
        f"max_pool{n}d_with_indices_backward adaptive_max_pool{n}d_backward": batched(*indexed, largest_backward),
        f"max_unpool{n}d": batched(f"{n} {n}", f"{n}", carry("self")),
    }


POOLING = table({
    **_spatial(1),
    **_spatial(2),
    **_spatial(3),
    "grid_sampler_2d": factors("n c _ _, n h w _ -> n c h w", linear("input")),
    "grid_sampler_3d": factors("n c _ _ _, n d h w _ -> n c d h w", linear("input")),
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa": batched("2", "2", linear("self")),
    "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward": batched(
        "2", "2", linear("grad_output"), size_argument=2
    ),
    "im2col": batched("3", "2", carry("self")),
    "col2im": batched("2", "3", linear("self")),
})  # fmt: skip
