"""Operators, tensors in and tensors out: each checks its arguments, allocates and launches the kernel of its noun.

A file is a verb and the noun of its kernels: `ops/rows/gather_rows.py` launches `kernels/rows/gather.py`.

- `argument_checks.py`, `run_kernel.py`: checks of arguments, and the launch on CPU or GPU; gradients by torch.
- `aggregate/`, `snapshots/`, `local_ids/`, `rows/`, `sampling/`: the operators by field.
- `keep_last_events.py`, `compute_content_hash.py`: streams of events, and comparison of contents.
"""
