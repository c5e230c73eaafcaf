"""What gloo processes hold while they run a program, compared with `plan.memory`."""
