"""Measurements of `pyg-direct bench` and `doctor` on a user's machine, each row beside a limit of the same run.

The project's own cases live in `benchmarks/` of the repository and take rows, clocks and limits from here.

- `limits.py`: clocks, and the highest rates of the machine, measured in the run that uses them.
- `measurements.py`: all parts of `pyg-direct bench`, at the size of a machine.
- `sampling.py`, `gather.py`, `loader.py`, `launch.py`: one measurement each.
- `beside.py`: our loader beside PyG's, in turns.
- `result_row.py`: rows, their files and their pictures.
"""
