"""Kernels over several snapshots at once.

- `sliced_csr.py`, `scaled_csr.py`: sums over the edges that snapshots share.
- `overlap.py`: the union of the edges of two snapshots.
- `recurrent_cells.py`: steps of gated units, LSTM and GRU.
"""
