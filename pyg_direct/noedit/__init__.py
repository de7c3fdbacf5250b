"""Unedited programs: PyG's loaders make ours, and its models are accelerated.

- `install.py`: `install` and `uninstall`, and the table of replaced classes.
- `replaced_class.py`: the replacement of one class.
- `startup/sitecustomize.py`: the start of Python processes that a program starts.
"""
