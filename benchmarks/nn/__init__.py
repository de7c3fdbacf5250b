"""Convolutions, models, whole graphs and inference, as PyG has them and accelerated."""
