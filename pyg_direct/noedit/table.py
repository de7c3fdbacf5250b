"""Which of PyG's classes are replaced, by what, and in which of PyG's modules."""

from __future__ import annotations

from typing import NamedTuple

from pyg_direct.loader.neighbor import NeighborLoader


class Replacement(NamedTuple):
    """One of PyG's classes.

    Attributes:
        module: Where PyG defines it.
        name: Its name.
        ours: What is made instead.
        also: PyG's other modules that make objects of it for the program.
    """

    module: str
    name: str
    ours: type
    also: tuple[str, ...]


REPLACEMENTS = (
    Replacement("torch_geometric.loader.neighbor_loader", "NeighborLoader", NeighborLoader,
                ("torch_geometric.loader",)),
)  # fmt: skip

# Loaders of PyG's that sample, for which there is none of ours.
LEFT = ("HGTLoader", "ShaDowKHopSampler", "GraphSAINTSampler", "ClusterLoader", "RandomNodeLoader")
