"""Batches: typed, timed and weighted ones, sets of nodes and walks, LABOR, growth with the graph, start, memory, power and accuracy."""
