"""The fuzz over shard_map programs: random per-rank code with collectives, against a loop over ranks."""
