"""What `pyg-direct bench` and `doctor` measure on a user's machine, each row beside a limit of the same run.

The project's own cases live in `benchmarks/` of the repository, which takes rows, clocks and limits from here.
"""
