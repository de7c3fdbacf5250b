"""Sampling plans: a multi-hop sample as one sequence of kernels, captured once and replayed for every batch."""
