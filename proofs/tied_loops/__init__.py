"""Plans of programs with loops, beside the optimum of the unrolled programs, where all trips are sharded alike."""
