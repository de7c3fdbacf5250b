"""Runtime services of GPU drivers and process groups.

- `cuda/`: devices, placed memory, streams, launches, captured graphs.
- `host/`: memory, pages, threads, views of tensors.
- `comm/`: exchange between processes.
"""
