"""The standard benchmark rows: what `benchmarks/run.py` measures on a machine, each beside a limit of the same run."""
