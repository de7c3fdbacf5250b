"""Aggregation of PyG's own convolutions by `ops/aggregate`, for models that stay as they are.

`sorted` knows which `edge_index` tensors are sorted by target, `accelerate` replaces what convolutions do with them.
"""
