"""Graphs cut into parts and written to folders.

- `partition_graph.py`: the function; `cli/partition.py` is its command.
- `inputs.py`, `builder.py`: checked input; the part of each node, and the steps that write files.
- `files.py`, `manifest.py`, `FORMAT.md`: files, their list, the owner of each node, and the format.
- `replicas.py`: copies of rows of other parts.
"""
