"""Draws and samples, tensors in and tensors out.

- `uniform.py`, `hetero.py`: one hop of one relation, and one hop over many relations.
- `random.py`: draws and permutations of a key.
- `split_by_owner.py`, `remote_edges.py`: nodes by owner, and the answers of owners.
- `expected_reads.py`: expected reads of rows.
- `induced.py`, `walks.py`: edges among the nodes of a set, and random walks.
"""
