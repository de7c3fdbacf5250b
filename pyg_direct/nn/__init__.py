"""Aggregation of PyG's own convolutions by `ops`, for models that stay unchanged.

- `accelerate.py`: `accelerate` overrides `propagate` and `forward` of convolutions.
- `sorted_edges.py`: the `edge_index` tensors that are known to be sorted by target; `whole_graphs.py`: whole graphs.
- `dispatch.py`: the accelerated operator if a batch allows it, otherwise PyG's code; for convolutions that add up rows.
- `static_batch.py`: signals `[B, N, F]` over one structure, in one pass.
- `any_convolution.py`: any other `MessagePassing`, whose reductions go over known targets; `weighted_rows.py`: those
    that sum rows of sources, times a weight or not.
- `conv/`: a file for each convolution, and the table of them; `fused_messages.py`: common parts of those whose messages
    are summed as they are computed.
- `hetero/`: layers over many relations, joined into one.
- `node_embedding.py`, `sparse_optimizers.py`: rows that are learned, and optimizers of the rows of a batch.
- `trimming.py`: rows that the next layer drops; `linear.py`: products of rows with matrices.
- `replay/`: steps and passes replayed as CUDA graphs, on batches of one layout.
- `module_state.py`: attributes on a user's module that are kept out of its pickles.
- `paths.py`: the path of each convolution, accelerated or PyG's, and the reason.
"""
