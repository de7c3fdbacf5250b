"""Operators over several snapshots at once, tensors in and tensors out.

- `sliced_csr.py`, `scaled_csr.py`, `packed.py`: structures of edges, and sums over them.
- `aggregate.py`, `overlap.py`: aggregation of several snapshots, and the edges that they share.
- `recurrent_cells.py`: steps of gated units, LSTM and GRU.
"""
