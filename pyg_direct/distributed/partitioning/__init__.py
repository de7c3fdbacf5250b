"""Graphs cut into parts and written to folders.

- `partition_graph.py`: the function, the part of each node, and the steps that write files; `cli/partition.py` is its
  command.
- `inputs.py`: checked input.
- `files.py`, `manifest.py`, `FORMAT.md`: files, their list, the owner of each node, and the format.
- `replicas.py`: copies of rows of other parts.
"""
