"""Batches prepared ahead of training (prefetch).

- `gpu_streams.py`, `cpu_threads.py`, `processes.py`: on streams of a GPU, by threads, by processes.
- `batch_groups.py`: several batches together; `graph_groups.py`: those of many small graphs.
- `foresight.py`: many at once, whose rows on disk are read once.
- `lockstep_ranks.py`: in step with other ranks.
"""
