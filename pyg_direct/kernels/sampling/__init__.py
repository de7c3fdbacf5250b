"""Kernels that draw random keys and picks.

- `random.py`: Philox, the source of all draws.
- `uniform.py`, `weighted.py`, `weighted_gpu.py`, `labor.py`, `hgt_budget.py`: one sampling rule each.
- `hetero.py`, `worklist.py`: picks over many relations; `captured_hops.py`: hops whose counts stay on a GPU.
- `remote_edges.py`: picks over parts of a graph; `frontier_segments.py`: the same with counts that stay on a GPU, and
  `row_segments.py`: the rows of the nodes then.
- `excluded_edges.py`: edges that a batch leaves out.
- `induced.py`: edges among the nodes of a set, and of several sets on a GPU.
- `walks.py`: random walks.
"""
