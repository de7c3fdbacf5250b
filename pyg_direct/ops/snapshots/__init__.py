"""Operators over several snapshots at once, tensors in and tensors out.

- `slice_csr.py`: unions of edges, and their structures, in memory and for sending.
- `aggregate.py`: aggregation of several snapshots.
- `run_recurrent_cells.py`: steps of gated units, LSTM and GRU.
"""
