"""Operators, tensors in and tensors out: each checks its arguments, allocates and launches the kernel of its noun.

- `argument_checks.py`, `run_kernel.py`: checks of arguments, and the launch on CPU or GPU.
- `double_backward.py`: gradients by torch's functions.
- `aggregate/`, `snapshots/`, `local_ids/`, `rows/`, `sampling/`, `temporal/`: the operators by field.
"""
