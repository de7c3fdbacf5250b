"""Content of a batch: rows and slices of each attribute of `Data` (`data.py`), `HeteroData` and stores.

- `attributes.py`: attributes of a graph, and copies of PyG's graphs.
- `stale_rows.py`: rows that a training loop writes back.
"""
