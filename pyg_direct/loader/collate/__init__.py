"""Content of a batch: rows and slices of each attribute of `Data` (`data.py`), stores, and `HeteroData`.

- `attributes.py`: attributes of a graph, and copies of PyG's graphs.
- `graph_batches.py`: batches of many small graphs, one or several together. `graph_sources.py` reads
  their data set. `graph_collation.py` joins graphs into the columns of `graph_columns.py`. `dense_batches.py` stacks
  graphs.
- `stale_rows.py`: rows that a training loop writes back.
"""
