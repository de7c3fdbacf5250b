"""Which of PyG's classes are replaced, by what, and in which of PyG's modules."""

from __future__ import annotations

from typing import NamedTuple

from pyg_direct import loader, sampler


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


_LOADER, _SAMPLER = "torch_geometric.loader", "torch_geometric.sampler"
_LIGHTNING = "torch_geometric.data.lightning.datamodule"
REPLACEMENTS = (
    Replacement(f"{_LOADER}.neighbor_loader", "NeighborLoader", loader.NeighborLoader, (_LOADER,)),
    Replacement(f"{_LOADER}.link_neighbor_loader", "LinkNeighborLoader", loader.LinkNeighborLoader, (_LOADER,)),
    Replacement(f"{_LOADER}.node_loader", "NodeLoader", loader.NodeLoader, (_LOADER, _LIGHTNING)),
    Replacement(f"{_LOADER}.link_loader", "LinkLoader", loader.LinkLoader, (_LOADER, _LIGHTNING)),
    Replacement(f"{_LOADER}.neighbor_sampler", "NeighborSampler", loader.NeighborSampler, (_LOADER,)),
    Replacement(f"{_LOADER}.hgt_loader", "HGTLoader", loader.HGTLoader, (_LOADER,)),
    Replacement(f"{_LOADER}.shadow", "ShaDowKHopSampler", loader.ShaDowKHopSampler, (_LOADER,)),
    # Not in PyG's own loaders, which call it in their own way when a program is left to them.
    Replacement(f"{_SAMPLER}.neighbor_sampler", "NeighborSampler", sampler.NeighborSampler, (_SAMPLER, _LIGHTNING)),
    Replacement(f"{_SAMPLER}.hgt_sampler", "HGTSampler", sampler.HGTSampler, (_SAMPLER,)),
)

# Loaders of PyG's that sample, for which there is none of ours.
LEFT = ("GraphSAINTSampler", "ClusterLoader", "RandomNodeLoader")
