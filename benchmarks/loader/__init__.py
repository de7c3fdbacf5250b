"""Batches: with types, times and weights, sets of nodes, walks, LABOR, growth, start-up, memory, power and accuracy."""
