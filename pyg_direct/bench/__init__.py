"""Measurements of `pyg-direct bench` and `doctor` on a user's machine, each row beside a limit of the same run.

The project's own cases live in `benchmarks/` of the repository and take rows, clocks and limits from here.

- `limits.py`: the highest rates of the machine, measured in the run that uses them.
- `sampling.py`, `gather.py`, `loader.py`, `launch.py`: one measurement each.
- `peers.py`, `peer_tables.py`: samplers and tables of other projects; `beside.py` measures ours beside them.
- `result_row.py`, `timing.py`, `contest.py`, `picture.py`: rows and their files, clocks, turns and pictures.
"""
