"""Batches that other processes make: those of their loader, in its order, whoever asks, leaves and comes back."""

from __future__ import annotations

import multiprocessing
from random import Random
from typing import Any

from pyg_direct import Producers
from tests.fuzz import links, neighbors, stores
from tests.fuzz.space import Row, Space
from tests.fuzz.ways import RANKS
from tests.processes import quick_starts

# Options of the loader that stay as they are: what they do is the loader's, which is sent.
FIXED = {
    **stores.FIXED, "replace": "no", "disjoint": "no", "subgraph": "directional", "strategy": "uniform",
    "compare": "<=", "window": "none", "fanout": "mixed", "fanout_by": "hop", "hops": "2", "reverses": "yes",
    "sorted": "no", "placement": "auto", "input_time": "own", "layout": "coo", "rows": "pyg",
    "negatives": "binary",
}  # fmt: skip


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        "via": ("NeighborLoader", "LinkNeighborLoader"), "graph": ("data", "hetero"), "held": ("whole", "stores"),
        "producers": ("1", "2", "3"), "ahead": ("1", "3"), "prefetch": ("0", "2"), "ranks": tuple(RANKS),
        "order": ("given", "shuffle", "drop_last"), "leave": ("never", "early", "resume"), "epochs": ("1", "3"),
        "seeds": ("ids", "repeated", "empty"), "time": ("none", "edge"), "ids": ("int64", "int32"),
        "threads": ("one", "all"),
    }  # fmt: skip
    rules = (
        (("ranks", "leave"), lambda ranks, leave: ranks == "none" or leave != "resume"),
    )  # fmt: skip
    return Space(options, rules)


def run(row: Row, random: Random, device: str) -> int:
    """Check the batches of producers on cores, wanted on the device."""
    whole = {**FIXED, **row, "links": stores.LINKS_AS[row["seeds"]]}
    if row["time"] == "edge":
        whole["input_time"] = "given"
    made: list[Producers] = []

    def wrap(loader: Any) -> Producers:
        made.append(Producers(loader, ["cpu"] * int(row["producers"]), device=device, ahead=int(row["ahead"])))
        return made[-1]

    def hold(data: Any) -> Any:
        return stores.hold(whole, random, "cpu", data) if row["held"] == "stores" else data

    before = set(multiprocessing.active_children())
    subject: Any = links if "Link" in row["via"] else neighbors
    with quick_starts():
        try:
            count: int = subject.run(whole, random, "cpu", hold=hold, wrap=wrap)
        finally:
            for producers in made:
                producers.close()
    assert set(multiprocessing.active_children()) <= before, "producers are left"
    return count
