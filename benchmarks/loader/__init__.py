"""Batches: typed, timed and weighted ones, sets of nodes, walks, LABOR, growth, start, memory, power and accuracy."""
