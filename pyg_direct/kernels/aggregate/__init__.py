"""Kernels over the edges of each target: sums, extremes, softmax, norms, self loops and padding.

- `sum.py`: weighted sums and means, slices of long rows, edges ordered by source, and messages of GINEConv.
- `max_min.py`, `softmax.py`, `batch_norm.py`: one operation each, with its adjoint.
- `typed_attention.py`: attention over many relations.
- `edge_layout.py`: edges with a loop for each target, and edges in places of fixed size.
"""
