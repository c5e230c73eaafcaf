"""Random numbers by explicit keys: the same on every mesh, each rank its shard."""
