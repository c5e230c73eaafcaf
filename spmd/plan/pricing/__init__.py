"""What a plan costs: the machine's constants, predicted times, arithmetic, and measuring."""
