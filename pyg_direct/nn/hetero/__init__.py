"""Layers over many relations, joined into one.

- `hetero_conv.py`: HeteroConv and models of `to_hetero`; the convolutions of a layer called together.
- `joined_edges.py`: edges of relations one behind the other, and their results.

How a convolution goes over several relations is in its own file, `conv/X.py`.
"""
