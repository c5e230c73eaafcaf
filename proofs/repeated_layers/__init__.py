"""Plans of programs with equal layers, planned once for all of them, beside those of the search of every layer."""
