"""Counter-based generators, and the operators of programs that draw by them.

An element of a result is a function of the key and its index in the unsharded result, so a rank computes its shard.
"""
