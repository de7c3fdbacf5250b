"""The command line, `pyg-direct` or `python -m pyg_direct`: a file a command, and what `doctor` asks of a machine."""
