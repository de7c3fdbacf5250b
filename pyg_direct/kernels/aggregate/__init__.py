"""Kernels over the edges of each target: sums, extremes, softmax, norms, self loops and padding.

- `sum.py`: weighted sums and means, slices of long rows, and edges ordered by source.
- `max_min.py`, `softmax.py`, `gine_messages.py`, `batch_norm.py`: one operation each, with its adjoint.
- `self_loops.py`, `padding.py`: edges with a loop for each target, and edges in places of fixed size.
"""
