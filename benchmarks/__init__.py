"""Standard benchmark rows: cases by room, each measured beside a limit of the same run and, if there is one, a peer.

`run.py` measures and draws them, `cases.py` lists them, `measured.py` writes the figures of README and docs
from `results/`. Measurements for a user's machine (`pyg-direct bench`) are in `pyg_direct/bench`.
"""
