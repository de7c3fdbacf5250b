"""Samplers for PyG's loaders, under the names that PyG has for them."""

from pyg_direct.loader.hgt import HGTSampler
from pyg_direct.loader.sampler import NeighborSampler

__all__ = ["HGTSampler", "NeighborSampler"]
