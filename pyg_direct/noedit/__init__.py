"""Unedited programs: PyG's loader classes create ours, and its models are accelerated.

- `install.py`: `install` and `uninstall`, and the table of replaced classes.
- `replaced_class.py`: the replacement of one class, or of one function; rows of loaders that derive from PyG's.
- `program_record.py`: objects made by our classes, and objects left to PyG.
- `optimizers.py`: steps of Adam by few calls of Python.
- `startup/sitecustomize.py`: start-up of Python processes that a program starts.
"""
