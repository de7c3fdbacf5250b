"""Kernels over streams of events: the latest neighbors of each node, and the events that its memory waits for.

- `last_neighbors.py`: rows of the latest neighbors, written and read.
- `last_messages.py`: the events of each node in the batch in which it came last.
"""
