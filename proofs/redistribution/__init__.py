"""Every redistribution between two specs: its values, gradients and memory, its cost beside an optimum and torch's."""
