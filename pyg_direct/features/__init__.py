"""Feature rows at rest: their memory, their hot rows, and `Feature` over both.

- `feature.py`, `feature_arguments.py`, `feature_store.py`: `Feature`, the checks of its arguments, and PyG's interface.
- `memory_rows.py`, `spilled_rows.py`: hot rows over a tier that kernels read in place, and over other tiers.
- `tiers/`: places that rows lie in, chosen in `tiers/choice.py`. They are memory of the GPU, of its peers
    and of the host, files, and parts of several processes.
- `hot_rows.py`: rows that are read most, ranked once or continuously.
- `trained_rows.py`: rows that training reads and replaces.
- `multi_read.py`: features read in one launch.
- `row_files.py`, `row_dtypes.py`: tables in files, and rows stored in fewer bits.
- `packed_rows.py`: tables rewritten in another order.
- `range_reader.py`, `disk_rates.py`: many rows of a file by large requests, and what a request costs the disk.
- `device_reader.py`: the same into GPU memory, through page-locked memory or by GPUDirect Storage.
- `paged_array.py`: numbers of an array in a file, by position.
- `tier_report.py`: rows that each tier holds and has served.
- `process_sharing.py`: one feature for several processes of a host, its copies and its pickles.
- `unified_tensor.py`, `unified_device.py`: `UnifiedTensor`, and the device `unified` in torch.
"""
