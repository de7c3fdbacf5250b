"""Convolutions, models, whole graphs and inference, of plain PyG and accelerated."""
