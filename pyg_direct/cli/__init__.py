"""Command line, `pyg-direct` or `python -m pyg_direct`.

- `app.py`: all commands as one program.
- `bench.py`, `cache.py`, `doctor.py`, `partition.py`, `run.py`, `warm.py`: one command each. They import torch when
  they run, not before, so that help and completion come at once.
- `failures.py`: errors in the words of options, files that cannot be written, packages that are missing.
- `machine_report.py`: facts about a machine, the choices of `auto` and advice, for `doctor`.
- `compile_ahead.py`: loops and kernels that `warm` compiles.
"""
