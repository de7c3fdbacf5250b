"""Feature rows at rest: their memory, their hot rows, and `Feature` over both.

- `feature.py`, `feature_store.py`: `Feature`, and PyG's interface to it.
- `hot_rows.py`, `adaptive_cache.py`: rows that are read most, ranked once or continuously.
- `row_files.py`, `row_dtypes.py`: tables in files, and rows stored in fewer bits.
- `tiers/`: rows on disk and in shards of several processes.
- `process_sharing.py`: one feature for several processes of a host.
- `unified_tensor.py`, `unified_device.py`: `UnifiedTensor`, and the device `unified` in torch.
"""
