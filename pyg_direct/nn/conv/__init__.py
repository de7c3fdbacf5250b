"""Accelerated convolutions of PyG, one per module."""
