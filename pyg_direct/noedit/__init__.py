"""Unedited programs: PyG's loaders make ours, and its models are accelerated.

- `install.py`: `install` and `uninstall`, and the table of replaced classes.
- `replaced_class.py`: the replacement of one class.
- `program_record.py`: what was made for the program, and what was left to PyG.
- `startup/sitecustomize.py`: the start of Python processes that a program starts.
"""
