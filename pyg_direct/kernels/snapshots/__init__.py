"""Kernels over several snapshots at once.

- `sliced_csr.py`: sums over the edges that snapshots share, and the union of the edges of two snapshots.
- `recurrent_cells.py`: steps of gated units, LSTM and GRU.
"""
