"""Graphs cut into parts and written to folders.

- `partition_graph.py`: the function; `cli/partition.py` is its command.
- `inputs.py`, `assign.py`, `builder.py`: checked input, the part of each node, and the steps that write files.
- `files.py`, `manifest.py`, `FORMAT.md`: files, their list and their format.
- `partition_book.py`, `replicas.py`: the owner of each node, and copies of rows of other parts.
"""
