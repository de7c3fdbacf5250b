"""Samplers for PyG's loaders, under the name that PyG has for them."""

from pyg_direct.loader.sampler import NeighborSampler

__all__ = ["NeighborSampler"]
