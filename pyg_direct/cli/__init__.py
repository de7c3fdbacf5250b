"""Command line, `pyg-direct` or `python -m pyg_direct`.

- `app.py`: all commands as one program.
- `bench.py`, `cache.py`, `doctor.py`, `run.py`: one command each.
- `machine.py`, `advice.py`, `plan.py`: facts about a machine, advice and the choices of `auto`, for `doctor`.
"""
