"""Tiers: rows of tables behind the `Tier` contract of `base.py`, chosen in `choice.py`.

- `device.py`: GPU memory.
- `peer.py`: memory of several GPUs that read each other's memory.
- `host.py`: host memory, which a GPU reads over its link.
- `disk.py`: files, read by threads.
- `window.py`: rows of files that planned batches read.
- `sharded.py`: a part in each process of a group.
"""
