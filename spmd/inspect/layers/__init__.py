"""The layers of a program, and how a plan shards them."""
