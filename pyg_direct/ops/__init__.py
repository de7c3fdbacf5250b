"""Tensors in, tensors out: each op checks its arguments, allocates and launches the kernel of the same noun."""
