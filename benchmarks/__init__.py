"""Standard benchmark rows: cases by room, each measured beside a limit of the same run and, where there is one, a peer.

`run.py` measures and draws them, `cases.py` lists them, `measured.py` writes the README's figures from `results/`. What
`pyg-direct bench` measures on a user's machine lives in `pyg_direct/bench`.
"""
