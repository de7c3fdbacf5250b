"""Aggregation of PyG's own convolutions by `ops`, for models that stay as they are.

`sorted` knows which `edge_index` tensors are sorted by target, `accelerate` replaces what convolutions do with them:
`propagate` for those that add up rows, `root` where a row of their own joins these, which `layer` computes in one step,
`gcn` and `attention` for those that weigh edges, `relational` for edges of several kinds, `trimmed` where rows are
dropped, `product` for the matrices behind them. `graphed` replays whole steps on batches that `padded` gives one
layout.
"""
