"""Which of PyG's classes are replaced, and by what."""

from __future__ import annotations

from typing import NamedTuple

from torch_geometric import loader as pyg_loader, sampler as pyg_sampler

from pyg_direct import loader, sampler


class Replacement(NamedTuple):
    """One of PyG's classes.

    Attributes:
        original: PyG's class.
        ours: What is made instead.
    """

    original: type
    ours: type

    @property
    def path(self) -> str:
        """The name as programs import it, such as `loader.NeighborLoader`."""
        return f"{self.original.__module__.split('.')[1]}.{self.original.__name__}"


REPLACEMENTS = (
    *(Replacement(getattr(pyg_loader, name), getattr(loader, name))
      for name in ("NeighborLoader", "LinkNeighborLoader", "NodeLoader", "LinkLoader", "NeighborSampler", "HGTLoader",
                   "ShaDowKHopSampler")),
    *(Replacement(getattr(pyg_sampler, name), getattr(sampler, name)) for name in ("NeighborSampler", "HGTSampler")),
)  # fmt: skip

# Loaders of PyG's that sample, for which there is none of ours.
LEFT = ("GraphSAINTSampler", "ClusterLoader", "RandomNodeLoader")
