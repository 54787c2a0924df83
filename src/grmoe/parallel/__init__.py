"""Training on many processes: the process mesh, sharded parameters, expert parallelism."""
