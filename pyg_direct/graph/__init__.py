"""Graph topology at rest: `CSRTopo` and the ways to make one.

- `csr_topo.py`, `hetero_topo.py`: compressed rows of one relation, and of all relations in one id space, with times
  and weights.
- `pyg_edges.py`: edges from PyG's and torch's containers.
- `placed_topology.py`: the arrays as kernels read them, and their memory.
- `metis.py`: parts of a graph that cut few edges.
"""
