"""The specification: slow and obvious, in NumPy and Python integers; shares no code with the package."""
