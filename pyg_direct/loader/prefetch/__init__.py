"""Batches prepared ahead of training (prefetch).

- `drivers.py`: on streams of a GPU, or by threads; `processes.py`: by processes.
- `batch_groups.py`: several batches together, also those of many small graphs.
- `foresight.py`: many at once, whose rows on disk are read once.
- `lockstep_ranks.py`: in step with other ranks.
"""
