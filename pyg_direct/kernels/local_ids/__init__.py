"""Kernels that find the new nodes of a batch and give them their local ids.

- `bitmap.py`, `new_nodes.py`: ranked bitmaps, and the new nodes of a hop from them.
- `sorted_buckets.py`: new nodes of a hop by their identities, in buckets on a GPU.
- `sorted_sources.py`: the same on a CPU, by sorting all sources.
- `relabel.py`, `csr.py`: local numbers of nodes, and offsets and orders of edges.
- `thread_block.py`: sums and running sums over the threads of one GPU block.
"""
