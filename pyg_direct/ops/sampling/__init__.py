"""Draws and samples, tensors in and tensors out.

- `sample_uniform.py`, `sample_hetero.py`: one hop of one relation, and one hop over many relations.
- `draw_random.py`: draws and permutations of a key.
- `join_remote_edges.py`: nodes by owner, and the answers of owners.
- `find_induced.py`: edges among the nodes of a set, and of several sets on a GPU.
- `draw_walks.py`: random walks.
"""
