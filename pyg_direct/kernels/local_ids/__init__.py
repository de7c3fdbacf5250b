"""Kernels that find the new nodes of a batch and give them their local ids.

- `bitmap.py`, `new_nodes.py`: ranked bitmaps, and the new nodes of a hop from them.
- `hash_table.py`, `hash_order.py`: new nodes by a hash table of identities, and their order.
- `relabel.py`, `csr.py`: local numbers of nodes, and offsets and orders of edges.
- `thread_block.py`: sums and running sums over the threads of one GPU block.
"""
