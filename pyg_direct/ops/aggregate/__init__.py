"""Aggregation operators over edges sorted by target, tensors in and tensors out.

- `sum_rows.py`, `operators.py`: sums, means, maxima and minima, and the operators behind them; messages of GINEConv.
- `compute_softmax.py`, `compute_typed_attention.py`: softmax and attention, of one relation and of many.
- `apply_batch_norm.py`, `products.py`: batch normalization; products of matrices and of the ends of edges.
- `build_edge_layout.py`: edges with loops, and padded edges.
"""
