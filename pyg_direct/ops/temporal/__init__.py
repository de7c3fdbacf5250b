"""Operators over streams of events, tensors in and tensors out.

- `last_neighbors.py`: the latest neighbors of each node.
- `last_messages.py`: the events of each node in the batch in which it came last.
"""
