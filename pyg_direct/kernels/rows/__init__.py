"""Kernels that move rows of tables: `gather.py`, `scatter.py`, and `multi_gather.py` for several tables."""
