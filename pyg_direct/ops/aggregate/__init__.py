"""Aggregation operators over edges sorted by target, tensors in and tensors out.

- `sum.py`, `operators.py`: sums, means, maxima and minima, and the operators behind them.
- `softmax.py`, `dot.py`, `gine_messages.py`, `batch_norm.py`: one operation each.
- `matmul.py`: products of rows with matrices; `self_loops.py`, `padding.py`: edges with loops, and padded edges.
"""
