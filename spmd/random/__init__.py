"""Random numbers by explicit keys, with the names of `jax.random`: the same on every mesh, each rank its shard."""

from spmd.random.choices import categorical, choice, permutation, randint
from spmd.random.dropping import dropout
from spmd.random.keys import Key, PRNGKey, fold_in, key, key_data, key_impl, split, wrap_key_data
from spmd.random.samples import bernoulli, bits, exponential, gumbel, normal, truncated_normal, uniform
from spmd.random.torch_generators import from_generator, to_generator
from spmd.random.uses import check_keys

__all__ = [
    "Key",
    "PRNGKey",
    "bernoulli",
    "bits",
    "categorical",
    "check_keys",
    "choice",
    "dropout",
    "exponential",
    "fold_in",
    "from_generator",
    "gumbel",
    "key",
    "key_data",
    "key_impl",
    "normal",
    "permutation",
    "randint",
    "split",
    "to_generator",
    "truncated_normal",
    "uniform",
    "wrap_key_data",
]
