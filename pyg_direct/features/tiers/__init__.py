"""Tiers: rows of tables behind the `Tier` contract of `base.py`, chosen in `choice.py`.

- `in_memory.py`: GPU memory, memory of several GPUs that read each other's, and host memory that a GPU reads over its
  link.
- `disk.py`: files, read by threads.
- `window.py`: rows of files that planned batches read.
- `sharded.py`: a part in each process of a group.
"""
