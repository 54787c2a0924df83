"""Training on many processes: the world they form, sharded parameters, experts divided among them."""
