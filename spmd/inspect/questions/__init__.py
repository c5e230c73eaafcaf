"""What a person asks of a plan: why, what else, what differs, and what it may send."""
