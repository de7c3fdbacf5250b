"""Kernels in Numba, arrays in and arrays out: the scalar step, CPU loop and GPU grid of one noun share a module.

- `sampling/`, `local_ids/`: picks of neighbors, and the new nodes of a batch with their local ids.
- `rows/`: gather and scatter.
- `aggregate/`, `snapshots/`: operations over the edges of each target, and over several snapshots at once.
- `last_events.py`: streams of events.
- `batch_counters.py`, `content_hash.py`: the state of one batch, and sums of contents.
- `binary_search.py`: steps that search in ascending values.
"""
