"""Batches: typed, timed and weighted ones, LABOR, growth with the graph, start, memory, power and accuracy."""
